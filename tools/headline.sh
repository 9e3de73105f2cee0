#!/bin/sh
# Cold prompts through a whole model in every lazy mode, beside their floor; docs/headline.md has the variables.
set -eu
exec "${PYTHON:-python3}" "$(dirname -- "$0")/headline.py" "$@"
