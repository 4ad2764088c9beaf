#!/bin/sh
# Debian packages that pip cannot bring: installed where we are root, else the command is printed.
#   system_packages.sh       three libraries that the Mooncake wheel loads
#   system_packages.sh test  HAProxy too, which the tests of the gateway start
set -eu
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
missing=""
for pair in libibverbs.so.1:libibverbs1 librdmacm.so.1:librdmacm1 libnuma.so.1:libnuma1; do
  ldconfig -p | grep -q "${pair%%:*}" || missing="$missing ${pair##*:}"
done
if [ "${1:-}" = test ] && ! command -v haproxy >/dev/null; then
  missing="$missing haproxy"
fi
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "Installing system packages:$missing"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
  echo "System packages are missing here. Please run, then start again:" >&2
  echo "  sudo apt-get update && sudo apt-get install -y$missing" >&2
  exit 1
fi
