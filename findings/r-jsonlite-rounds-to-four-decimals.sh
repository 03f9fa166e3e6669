#!/usr/bin/env bash
# toJSON of jsonlite, the JSON of R, rounds to four digits after the point: 99.99999 becomes 100, and 0.00004 becomes
# 0. R itself shows both as they are, and so does digits = NA.
# Guess: 99.99999 and 0.00004 or 4e-05, as every JSON library writes them.
# Seen with jsonlite 1.8.4 and R 4.2.2 (Debian 12).
# In a template, a section of such a value is not rendered, because 0 is false: the alert has no text. A page about
# templates should say that 0 is false, so that nobody writes a section for a measured value.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
cd "$dir" || exit 2
have apt-get download -qq r-base-core=4.2.2.20221110-2 r-cran-jsonlite=1.8.4+dfsg-1 libblas3 liblapack3 libgfortran5
for package in ./*.deb; do have dpkg -x "$package" .; done
libraries=$(echo "$dir"/usr/lib/*-linux-gnu)
R() {
  R_HOME=$dir/usr/lib/R R_LIBS=$dir/usr/lib/R/site-library R_DEFAULT_PACKAGES=NULL \
    LD_LIBRARY_PATH=$dir/usr/lib/R/lib:$libraries/blas:$libraries/lapack:$libraries \
    timeout 60 "$dir/usr/lib/R/bin/exec/R" --vanilla --no-echo "$@"
}
rm -f "$dir/usr/lib/R/etc/Renviron" # a link out of the folder
touch "$dir/usr/lib/R/etc/Renviron"
have R -e 'library(jsonlite)' # needs libraries such as readline
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
r() { R -e "cat($1)" 2>"$dir/log"; }
check 'R' "$(r 'c(99.99999, 0.00004)')" '99.99999 4e-05'
check 'toJSON' "$(r 'jsonlite::toJSON(c(99.99999, 0.00004))')" '[100,0]'
check 'toJSON, digits = NA' "$(r 'jsonlite::toJSON(c(99.99999, 0.00004), digits = NA)')" '[99.99999,4e-05]'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
