"""`python -m zipage_lang.evaluation`: the same as `zipage eval`, where only the package is there.

Knows nothing of what the command does.
"""

import typer

from zipage_lang.evaluation.command import evaluate

if __name__ == "__main__":
    typer.run(evaluate)
