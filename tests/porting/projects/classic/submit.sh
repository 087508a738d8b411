#!/bin/sh
# The master is http://localhost:8080 unless DET_MASTER says otherwise.
det e create const.yaml . -f
det -m "$MASTER" experiment create adaptive.yaml . \
    --config searcher.max_trials=4
