#!/bin/sh
det experiment create const.yaml .
