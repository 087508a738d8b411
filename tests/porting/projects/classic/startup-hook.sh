#!/bin/sh
export HOUSES=32
