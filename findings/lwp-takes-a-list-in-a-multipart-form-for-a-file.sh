#!/usr/bin/env bash
# POST of Perl's HTTP::Request::Common repeats a field whose value is a list. With Content_Type => 'form-data', which a
# picture needs, the same list is a file: its first element is the path to read, and the second the name to send.
# Guess: the field is repeated, as in the form without a picture.
# Seen with HTTP::Message 6.44 (Debian 12, LWP 6.68): "Can't open file +15550100002".
# A script with two recipients dies when it gets a picture. A page that shows LWP should write the pair once for each.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
have() {
  "$@" >"$dir/log" 2>&1 || {
    echo "cannot be had: $*"
    exit 2
  }
}
command -v perl >/dev/null || { echo 'no perl here'; exit 2; }
cd "$dir" || exit 2
have apt-get download -qq libhttp-message-perl=6.44-1 liburi-perl libencode-locale-perl libhttp-date-perl \
  libtimedate-perl libio-html-perl liblwp-mediatypes-perl libclone-perl libregexp-ipv6-perl
for package in ./*.deb; do have dpkg -x "$package" .; done
export PERL5LIB=$dir/usr/share/perl5:$(echo "$dir"/usr/lib/*-linux-gnu/perl5/*)
have perl -e 'use HTTP::Request::Common'
cat >post.pl <<'PERL'
use HTTP::Request::Common 'POST';
my ($type) = @ARGV;
my @to = ('+15550100002', '+15550100003');
my @pairs = $type =~ s/ in pairs// ? map { (recipients => $_) } @to : (recipients => \@to);
my $request = eval { POST('http://127.0.0.1/', Content_Type => $type, Content => \@pairs) };
print $request ? join(' ', $request->content =~ /\+\d+|%2B\d+/g) : $@ =~ s/ at .*//sr;
PERL
changed=0
check() {
  echo "$1: $2"
  [ "$2" = "$3" ] || changed=1
}
missing="Can't open file +15550100002: No such file or directory"
form=application/x-www-form-urlencoded
check "$form" "$(perl post.pl $form)" '%2B15550100002 %2B15550100003'
check 'form-data' "$(perl post.pl form-data)" "$missing"
check 'form-data in pairs' "$(perl post.pl 'form-data in pairs')" '+15550100002 +15550100003'
[ "$changed" = 0 ] || echo 'CHANGED'
exit "$changed"
