#!/bin/sh
# Installs programs that some tests use besides Python's packages: a browser (reports), ip and tc (emulated networks),
# sshd and rsync (starting ranks on other machines), sshd only where installing it does not start it as a service.
# Only as root on Debian and its kin; elsewhere, or if that fails, it says so, and those tests are skipped.
missing=""
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || missing="chromium"
command -v ip >/dev/null && command -v tc >/dev/null || missing="$missing iproute2"
command -v rsync >/dev/null || missing="$missing rsync"
command -v ssh >/dev/null || missing="$missing openssh-client"
command -v sshd >/dev/null || [ -x /usr/sbin/sshd ] || [ -d /run/systemd/system ] || missing="$missing openssh-server"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing$(printf ' %s' $missing), which some tests use."
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends $missing; } >/dev/null 2>&1 && exit 0
fi
echo "Not installed:$(printf ' %s' $missing). The tests that need it will be skipped; install it for all of them."
