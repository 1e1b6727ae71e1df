"""Closed-loop success of what a server serves: paired episodes over settings, ``saccade eval``."""

from saccade.eval.runner import Job, Log, read, run
from saccade.eval.settings import Setting, parse, with_baselines
from saccade.eval.summary import summarise

__all__ = ["Job", "Log", "Setting", "parse", "read", "run", "summarise", "with_baselines"]
