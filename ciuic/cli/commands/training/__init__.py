"""Commands about trainings and their states: ``watch``, ``export`` and ``import``.

They may import `ciuic.cli.shared` and, when they run, the library; no other command.
"""
