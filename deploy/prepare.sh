#!/bin/sh
# Checks what pip cannot install, installs it where it may (Debian as root), and says what is missing.
# usage: prepare.sh PYTHON
set -eu

python=$1

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "LatencyPrism needs Python 3.11 or newer; '$python' is not. Try: make PYTHON=python3.12 demo" >&2
    exit 1
}

java_major() {
    java -version 2>&1 | sed -nE 's/.*version "([0-9]+).*/\1/p' | head -n 1
}

missing=
command -v java >/dev/null 2>&1 && [ "$(java_major)" -ge 17 ] || missing="$missing openjdk-17-jre-headless"
command -v mvn >/dev/null 2>&1 || missing="$missing maven"
command -v haproxy >/dev/null 2>&1 || missing="$missing haproxy"
"$python" -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv"
command -v cc >/dev/null 2>&1 || missing="$missing gcc"

[ -z "$missing" ] && exit 0

if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    echo "Installing:$missing"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086 one word a package
    apt-get install -y -qq --no-install-recommends $missing >/dev/null
    exit 0
fi

echo "Not installed:$missing" >&2
case "$missing" in
    *jre*|*maven*) echo "  Java 17 and Maven run the real Apache Kafka; without them the demo falls back to a broker from a Python wheel." >&2 ;;
esac
case "$missing" in *haproxy*) echo "  haproxy is needed by the tests of its adapter; without it they are skipped." >&2 ;; esac
case "$missing" in *gcc*) echo "  A C compiler builds the fake GPU driver of some tests; without it they are skipped." >&2 ;; esac
case "$missing" in
    *python3-venv*) echo "  Python's venv module is needed: apt-get install python3-venv" >&2; exit 1 ;;
esac
