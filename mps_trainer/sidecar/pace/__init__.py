"""The pace: when the sidecar trains beside a busy engine, and when it yields. See docs/pace.md."""
