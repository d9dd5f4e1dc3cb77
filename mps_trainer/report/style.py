"""The style sheet of a run's page."""

STYLE = """
:root {
  --paper: #ffffff; --card: #f7f7f8; --ink: #1c1d1f; --soft: #5b5f66; --grid: #e3e4e6; --line: #d9dadd;
  --blue: #0072b2; --orange: #c67c00; --green: #008a65; --red: #c9490a; --purple: #8a4fa3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16181b; --card: #1e2125; --ink: #eceef0; --soft: #a3a9b1; --grid: #2f3338; --line: #363b41;
    --blue: #56b4e9; --orange: #f0b23c; --green: #35c79b; --red: #ff8552; --purple: #c79adf;
  }
}
@media print {
  :root {
    --paper: #ffffff; --card: #ffffff; --ink: #000000; --soft: #444444; --grid: #dddddd; --line: #bbbbbb;
    --blue: #0072b2; --orange: #c67c00; --green: #008a65; --red: #c9490a; --purple: #8a4fa3;
  }
  main { max-width: none !important; padding: 0 !important; }
  body { font-size: 12px; }
  .charts { grid-template-columns: 1fr 1fr !important; }
  figure, tr, .tiles div { break-inside: avoid; }
  h2 { break-after: avoid; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 0; }
footer { max-width: 1120px; margin: 0 auto; padding: 24px 20px; color: var(--soft); font-size: 13px; }
h1 { font-size: 26px; margin: 0; }
h2 { font-size: 16px; margin: 0 0 4px; }
header p { margin: 4px 0 0; color: var(--soft); }
code { font-family: ui-monospace, monospace; font-size: .92em; overflow-wrap: anywhere; }
.state { font-size: 14px; font-weight: 600; padding: 3px 10px; border: 1px solid var(--line); border-radius: 12px;
  vertical-align: middle; color: var(--soft); }
.state.ready, .state.stopped { color: var(--green); }
.state.failed, .state.restarting { color: var(--red); }
.remarks { margin: 18px 0 0; padding: 12px 16px 12px 34px; border-left: 4px solid var(--orange);
  background: var(--card);  white-space: pre-line; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(138px, 1fr)); gap: 12px; margin: 20px 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 0; font-size: 22px; font-weight: 600; }
.tiles small { display: block; font-size: 12px; font-weight: 400; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; padding: 14px 16px; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figure.wide { grid-column: 1 / -1; }
figure svg { display: block; width: 100%; height: auto; }
figcaption p { margin: 0 0 6px; color: var(--soft); font-size: 13px; }
.nothing { color: var(--soft); margin: 10px 0; }
section { margin-top: 28px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
td:first-child { white-space: nowrap; }
details { margin-top: 10px; }
summary { cursor: pointer; color: var(--soft); }
"""
