#!/usr/bin/env bash
# jsonlite, the JSON of R, writes each value as a list: a message is ["hello"]. auto_unbox = TRUE makes a text of it,
# and also of a list of one recipient, which stays a list only if there are two. NULL is an object, {}.
# Guess: "hello", a list for recipients, and null.
# Seen with jsonlite 1.8.4 and R 4.2.2 (Debian 12). unbox() and list() say which is meant.
# A gateway that takes a list for a text, or joins it, hides such a mistake until there are two recipients. It should
# say "must be a string" with the field's name, and may read one text as a list of one.
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
json() { R -e "cat(jsonlite::toJSON($1))" 2>"$dir/log"; }
send='list(message = "hello", recipients = "+15550100002", other = NULL)'
two='list(recipients = c("+15550100002", "+15550100003"))'
check 'toJSON' "$(json "$send")" '{"message":["hello"],"recipients":["+15550100002"],"other":{}}'
check 'auto_unbox' "$(json "$send, auto_unbox = TRUE")" '{"message":"hello","recipients":"+15550100002","other":{}}'
check 'auto_unbox, two' "$(json "$two, auto_unbox = TRUE")" '{"recipients":["+15550100002","+15550100003"]}'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
