"""One page on a run's folder: ``page`` puts together the sections of ``run``, ``success`` and ``server``."""
