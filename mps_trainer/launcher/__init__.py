"""From a Trinity YAML to a running sidecar and back: plan, derived config, supervisor, Ray, verdict, doctor.

Imports neither torch, pyarrow, ray nor trinity: what needs them runs as a process of its own.
"""
