"""Stand-ins for a GPU engine: what lets the real trinity-rft run on a laptop. See README.md beside this folder."""
