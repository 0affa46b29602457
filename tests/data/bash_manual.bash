# Scripts of one construct each, in the order of bash's manual (tests/oracles/bash.py reads them).
# A line is a script; lines indented by two spaces belong to the script above them.
# RUN is the launch. `## ` begins a section.
## quoting
RUN a\ b \$A \\ \' \" \* \n \
  --x 1
RUN 'a  b' '$A "x"' '\n' '' 'a\'
RUN "a  b" "it's" "" "\"" "\\" "\$A" "\n" "\`"
A=1; RUN "$A" '$A' "'$A'" "\"$A\""
RUN "a\
  b" c
RUN 'a\
  b'
RUN $'a\tb' $'a\nb' $'it\'s' $'\\' $'\x41' $'\101' $'\u00e9' $'\e' $'\cA'
RUN $'\"' $'\?' $'\q' $'a\x4' $'\07'
RUN $"text" $"a b"
RUN a"b c"d'e f'g\ h
RUN "" '' $A""
RUN ""a ''
A=''; RUN $A "$A" $A$A "$A"x
A="a  b"; RUN $A "$A" x$A x"$A"y
A=' a '; RUN x$A"y" "z"$A
RUN # no words
RUN a#b '#' \#c $# ${#A}
RUN --x 1 # a comment with 'quote
A=#x; RUN "$A"
RUN "a" \
  # a comment ends the command
  --x 1
RUN !x "a!b" !
RUN a=b --c=d e+=f
RUN ~x "~" '~'/a a~ \~
A=~/x; RUN "${A#$HOME}"
RUN a$ $ "$" "a$" $.x
RUN "${A-"a b"}" "${A-'a b'}"
RUN `echo a` "`echo a b`" `echo \`echo b\``
RUN "`echo "a b"`" "$(echo "a  b")"
RUN "a	b" a	b
RUN é "naïve" 'ü'
RUN "\a" '\a' \a
RUN a\\b 'a\\b' "a\\b" "a\\\\b"
## commands and lists
RUN a; RUN b
RUN a && RUN b
RUN a || RUN b
true && RUN a
false && RUN a
false || RUN a
true || RUN a
false && true || RUN a
true && false || RUN a
! true || RUN a
! false && RUN a
! true && RUN a
! ! true && RUN a
A=1 && B=2; RUN $A $B
false && A=1; RUN "$A"
A=1 | true; RUN "$A"
A=0; echo x | A=1; RUN $A
A=0; echo x | { read A; }; RUN $A
A=0; (A=1); RUN $A
A=0; { A=1; }; RUN $A
A=0; A=1 & wait; RUN $A
A=0; { A=1; } & wait; RUN $A
A=0; $(A=1); RUN $A
true | false && A=1; RUN "$A"
set -o pipefail; false | true && A=1; RUN "$A"
set -o pipefail; true | false || A=1; RUN "$A"
! true | false && A=1; RUN "$A"
time RUN a
time -p RUN a
{ RUN a; }
( RUN a )
(RUN a)
((RUN a) )
A=1 RUN "$A"
A=0; A=1 RUN "$A"
A=0; A=1 true; RUN "$A"
A=0; A=1 B=$A; RUN "$A" "$B"
A=0; B=$A A=1; RUN "$A" "$B"
A=0; A=1 eval 'B=$A'; RUN "$A" "$B"
A=0; F() { B=$A; A=3; }; A=1 F; RUN "$A" "$B"
A=0; A=1 :; RUN "$A"
A=0; A=1 export B=2; RUN "$A" "$B"
env A=1 RUN a
command RUN a
exec RUN a
exec RUN a; RUN b
nohup RUN a
RUN a & wait
if false; then :; fi; RUN $?
false; RUN $?
(exit 3); RUN $?
A=$(exit 4); RUN $?
A=$(exit 4) B=$(true); RUN $?
F() { return 5; }; F; RUN $?
[ 1 = 2 ]; RUN $?
true; A=$?; RUN $A
! false; RUN $?
false; B=1; RUN $?
true | false; RUN $? ${PIPESTATUS[0]} ${PIPESTATUS[1]}
exit 1; RUN a
exit; RUN a
(exit 1); RUN a
{ exit 1; }; RUN a
false | exit 1; RUN a
A=$(exit 1); RUN a
if RUN a; then RUN b; fi
RUN a || { echo failed; exit 1; }
A=0; if A=1; then :; fi; RUN $A
coproc cat; RUN a
RUN a;; RUN b
fi; RUN a
done
  RUN a
} ; RUN a
) ; RUN a
&& RUN a
RUN a (b)
## if, case, loops
if true; then A=1; else A=2; fi; RUN $A
if false; then A=1; elif true; then A=2; else A=3; fi; RUN $A
if false; then A=1; fi; RUN "$A"
if true; false; then A=1; else A=2; fi; RUN $A
if ! false; then A=1; fi; RUN $A
if { true; }; then A=1; fi; RUN $A
if (false); then A=1; else A=2; fi; RUN $A
if true
  then A=1
  fi
  RUN $A
A=b; case $A in a) B=1;; b) B=2;; *) B=3;; esac; RUN $B
A=b; case $A in a|b) B=1;; esac; RUN $B
A=b; case $A in (a) B=1;; (b) B=2;; esac; RUN $B
A=b; case $A in a) B=1;; b) B=2; esac; RUN $B
A=b; case $A in b) B=1;& c) B+=2;; d) B+=3;; esac; RUN $B
A=b; case $A in b) B=1;;& c) B+=2;; [a-c]) B+=3;; *) B+=4;; esac; RUN $B
A='a b'; case $A in "a b") B=1;; *) B=2;; esac; RUN $B
A='*'; case $A in '*') B=1;; *) B=2;; esac; RUN $B
A='x*'; case xyz in $A) B=1;; *) B=2;; esac; RUN $B
A='x*'; case xyz in "$A") B=1;; *) B=2;; esac; RUN $B
A=; case $A in '') B=1;; *) B=2;; esac; RUN $B
A=; case "$A" in ?*) B=1;; *) B=2;; esac; RUN $B
case x in y) B=1;; esac; RUN $? "$B"
case ab in a?) B=1;; *) B=2;; esac; RUN $B
case a5 in [a-z][0-9]) B=1;; *) B=2;; esac; RUN $B
case a5 in a[!0-4]) B=1;; *) B=2;; esac; RUN $B
case a5 in a[^5]) B=1;; *) B=2;; esac; RUN $B
case 'a]' in a[]]) B=1;; *) B=2;; esac; RUN $B
case a- in a[x-]) B=1;; *) B=2;; esac; RUN $B
case 'a[' in a[) B=1;; *) B=2;; esac; RUN $B
case 'a*' in a\*) B=1;; *) B=2;; esac; RUN $B
case ab in a\*) B=1;; *) B=2;; esac; RUN $B
case aB in a[[:upper:]]) B=1;; *) B=2;; esac; RUN $B
case a3 in a[[:digit:][:space:]]) B=1;; *) B=2;; esac; RUN $B
case a_ in a[[:alnum:]_]) B=1;; *) B=2;; esac; RUN $B
case AB in ab) B=1;; *) B=2;; esac; RUN $B
shopt -s nocasematch; case AB in ab) B=1;; *) B=2;; esac; RUN $B
shopt -s extglob
  case aab in +(a|b)) B=1;; *) B=2;; esac
  RUN $B
shopt -s extglob
  case c in !(a|b)) B=1;; *) B=2;; esac
  RUN $B
case /a/b in */b) B=1;; *) B=2;; esac; RUN $B
case .a in *a) B=1;; *) B=2;; esac; RUN $B
case "a
  b" in a*b) B=1;; *) B=2;; esac; RUN $B
case x in x) break;; esac; RUN a
for A in 1 2 3; do B+=$A; done; RUN $A $B
for A in; do B=1; done; RUN "$A" "$B"
for A in a "b c" 'd'; do B+="[$A]"; done; RUN "$B"
A='1 2'; for C in $A "$A"; do B+="[$C]"; done; RUN "$B"
for A in {1..3} {a,b}; do B+=$A; done; RUN $B
for A in $(seq 3); do B+=$A; done; RUN $B
for A in `seq 1 2 5`; do B+=$A-; done; RUN $B
for A in $(echo a b); do B+=$A-; done; RUN $B
P=(a 'b c'); for A in "${P[@]}"; do B+="[$A]"; done; RUN "$B"
P=(a 'b c'); for A in ${P[@]}; do B+="[$A]"; done; RUN "$B"
P=(a 'b c'); for A in "${!P[@]}"; do B+="[$A]"; done; RUN "$B"
set -- a 'b c'; for A; do B+="[$A]"; done; RUN "$B"
set -- a 'b c'; for A in "$@"; do B+="[$A]"; done; RUN "$B"
for A in 1 2; do RUN $A; done
for A in 1 2 3; do [ $A = 2 ] && break; B+=$A; done; RUN $B
for A in 1 2 3; do [ $A = 2 ] && continue; B+=$A; done; RUN $B
for A in 1 2; do for C in x y; do break 2; done; done; RUN $A $C
for A in 1 2; do for C in x y; do continue 2; done; B=$A; done; RUN $A $C "$B"
for A in 1 2; do break 5; done; RUN $A
for A in 1 2; do break 0; done; RUN $A
break; RUN a
continue; RUN a
for ((i = 0; i < 3; i++)); do B+=$i; done; RUN $i $B
for ((i = 3; i; i--)); do B+=$i; done; RUN $i $B
for ((i = 0, j = 9; i < j; i += 2, j -= 2)); do B+=$i$j-; done; RUN $B
for ((;;)); do break; done; RUN a
for ((i = 0; i < 3; i++)) { B+=$i; }; RUN $B
for A in 1 2; { B+=$A; }; RUN $B
i=0; while [ $i -lt 3 ]; do i=$((i + 1)); done; RUN $i
i=0; while ((i < 3)); do ((i++)); [ $i = 2 ] && break; done; RUN $i
i=0; until [ $i -ge 3 ]; do i=$((i + 1)); done; RUN $i
i=0; while true; do i=$((i + 1)); [ $i = 4 ] && break; done; RUN $i
i=0; while :; do ((++i > 4)) && break; done; RUN $i
while false; do :; done; RUN $?
i=0; while ((i++ < 2)); do false; done; RUN $?
for A in 1; do false; done; RUN $?
for A in 1 2; do echo $A; done | while read C; do B+=$C; done; RUN "$B"
for A in 1 2; do B+=$A; done | cat; RUN "$B"
select A in a b; do break; done; RUN "$A"
select A in a b; do break; done <<< 2; RUN "$A"
for in in a; do B=$in; done; RUN $B
for A in a; do if true; then continue; fi; B=1; done; RUN "$B"
F() { break; }; for A in 1 2; do F; done; RUN $A
for A in *.none; do B=$A; done; RUN $B
while read A; do B+=$A; done <<< "x"; RUN "$A" $B
while read -r A C; do B+=$C$A; done <<EOF
  1 2
  3 4
  EOF
  EOF
  RUN "$B"
## functions
F() { A=1; }; F; RUN $A
function F { A=1; }; F; RUN $A
function F() { A=1; }; F; RUN $A
F() ( A=1; ); A=0; F; RUN $A
F() { A=$1; B=$2; C=$#; }; F x "y z"; RUN "$A" "$B" "$C"
F() { A="$*"; B=("$@"); }; F x "y z"; RUN "$A" "${B[@]}"
F() { A=$1; }; F; RUN "[$A]"
F() { RUN "$@"; }; F a "b c"
F() { RUN $@; }; F a "b c"
F() { RUN "$*"; }; F a "b c"
F() { RUN "${@:2}" "${@: -1}" "${*:2:1}"; }; F a "b c" d
F() { RUN ${10} $10; }; F 1 2 3 4 5 6 7 8 9 x
F() { shift; RUN "$@"; }; F a b c
F() { shift 2; RUN "$@"; }; F a b c
F() { shift 5; RUN $? "$@"; }; F a b
F() { A=1; return; A=2; }; F; RUN $A
F() { return 1; }; F || A=1; RUN "$A"
F() { return 1; }; F && A=1; RUN "$A"
F() { false; }; if F; then A=1; else A=2; fi; RUN $A
F() { false; return; }; F; RUN $?
F() { return 256; }; F; RUN $?
F() { return $1; }; F 7; RUN $?
F() { local A=1; B=$A; }; A=0; F; RUN $A $B
F() { local A; B="[$A]"; }; A=0; F; RUN $A "$B"
F() { local A=$A; B=$A; }; A=5; F; RUN $A $B
F() { local A=1 B=$A; C=$B; }; A=0; F; RUN "$C"
F() { local A=1; G; }; G() { B=$A; }; A=0; F; RUN $B
F() { local A=1; G; B=$A; }; G() { A=2; }; A=0; F; RUN $A $B
F() { local -i A=1+1; B=$A; }; F; RUN $B
F() { local -a A=(1 2); B=${A[1]}; }; F; RUN $B
F() { local -r A=1; B=$A; }; F; A=2; RUN $A $B
F() { local -A M=([x]=1); B=${M[x]}; }; F; RUN $B
F() { local -n R=$1; R=5; }; A=0; F A; RUN $A
F() { local -n R=$1; R+=(x "$2"); }; P=(a); F P b; RUN "${P[@]}"
F() { declare A=1; }; A=0; F; RUN $A
F() { declare -g A=1; }; A=0; F; RUN $A
F() { export A=1; }; A=0; F; RUN $A
F() { readonly A=1; }; F; RUN $A
F() { unset A; }; A=0; F; RUN "[$A]"
F() { local A=1; unset A; B=${A-unset}; }; A=0; F; RUN $B
F() { local A=$(false); B=$?; }; F; RUN $B
F() { local A; A=$(false); B=$?; }; F; RUN $B
local A=1; RUN "[$A]"
return 1; RUN a
F() { echo "$1-$2"; }; A=$(F a b); RUN $A
F() { echo a; echo b; }; RUN $(F) "$(F)"
F() { A=1; echo x; }; A=0; B=$(F); RUN $A $B
F() { printf '%s\n' "$@"; }; RUN $(F 1 2 3)
F() { if [ $1 -gt 0 ]; then B+=$1; F $(($1 - 1)); fi; }; F 3; RUN $B
F() { A=1; }; unset -f F; F; RUN "[$A]"
F() { A=1; }; F() { A=2; }; F; RUN $A
F; F() { A=1; }; RUN "[$A]"
F() { G() { A=2; }; }; F; G; RUN $A
F() { A=$FUNCNAME; }; F; RUN $A
F() { A=$0; }; F; RUN "${A##*/}x"
F() { set -- x y; }; set -- a; F; RUN "$@"
F() { exit 1; }; F; RUN a
F() { exit 1; }; (F); RUN a
F() { exit 1; }; A=$(F); RUN a
F() { A=$1; } > .out; F x; RUN $A
a-b() { A=1; }; a-b; RUN $A
echo() { A=1; }; echo; RUN $A
true() { return 1; }; true || A=1; RUN "$A"
test() { return 1; }; test 1 = 1 || A=1; RUN "$A"
cd() { A=$1; }; cd x; RUN $A
F() { trap 'A=2' RETURN; A=1; }; F; RUN $A
F() { local IFS=,; A="$*"; }; F a b; RUN "$A" "$*"
F() { local A=1; local A; B=$A; }; F; RUN $B
F() { local A=1; local A=2; B=$A; }; A=0; F; RUN $A $B
F() { local A B=2 C; C=3; }; F; RUN "[$A$B$C]"
F() { local set=1; local -; set -f; }; F; RUN a
## parameters
set -- a b; RUN $1 $2 $# "$3"
set -- a "b c"; RUN $@
set -- a "b c"; RUN "$@"
set -- a "b c"; RUN $*
set -- a "b c"; RUN "$*"
set -- a "b c"; RUN "x$@y" x"$@" "$@"y
set -- a b; RUN "$@$@"
set -- ; RUN "$@" "$*" $#
set -- ; RUN "x$@y" ""$@
set -- '' ''; RUN "$@" $#
set -- '' ''; RUN $@ $#
IFS=,; set -- a b c; RUN "$*" "$@"
IFS=; set -- a b c; RUN "$*" $*
IFS=,; P=(a b c); RUN "${P[*]}" ${P[*]}
IFS=,; set -- a b; A=$*; RUN "$A"
IFS=,; set -- a b; A=$@; RUN "$A"
set a b; RUN $1 $2
set -- -x; RUN "$1"
set -- "$A" b; RUN $#
set - a b; RUN $#
set -e -- a b; RUN $#
set -- {1..3}; RUN "$@"
set -- $(seq 3); RUN "$@"
set -- a b c; shift; RUN "$@"
set -- a b c; shift 2; RUN "$@"
set -- a b c; shift 4; RUN "$@" $?
set -- a b c; shift 0; RUN "$@"
set -- a; shift; RUN $#
set -- a b c; RUN ${@:2} ${@:1:2} ${@: -1} ${*: -2:1}
set -- a b c; RUN ${!#} ${#@} ${#*} ${#1}
set -- a b c; RUN ${@:3:5} "${@:4}" x
set -- abc; RUN ${1:1} ${1%c} ${1^} ${1:-x} ${4:-y}
set -- 1 2; RUN $((  $1 + $2 )) $(($# * 2))
set -- a b c d e f g h i j; RUN $10 ${10}
set -- x=1; declare "$1"; RUN $x
A=-; RUN $A-x; RUN "$-x"
RUN "$-"
RUN $_
RUN $0
RUN ${LINENO}
RUN ${#-} x
RUN ${PWD:+set} ${HOME:+set} ${UID:+set} ${RANDOM:+set}
RUN ${BASH_VERSION:+set} ${BASH:+set} ${HOSTNAME:+set} ${SECONDS:+set} ${OSTYPE:+set}
RUN "${IFS}"
RUN ${BASH_SOURCE[0]:+set} "${FUNCNAME[0]}" ${OPTIND}
[ -n "$PWD" ] && A=1; RUN "$A"
[ -z "$RANDOM" ] && A=1; RUN "$A"
[ "$PPID" -gt 0 ] && A=1; RUN "$A"
## variables and declare
A=1; A+=2; RUN $A
A+=2; RUN $A
A=1; unset A; RUN "[$A]"
A=1 B=2; RUN $A$B
A=b; B=$A$A; RUN $B
A = 1; RUN "[$A]"
A= 1; RUN "[$A]"
1A=2; RUN a
A-B=2; RUN a
A=(1 2); A=3; RUN "${A[@]}"
A=1; A=(2 3); RUN $A ${#A[@]}
A=1; A[2]=x; RUN "${A[@]}" ${#A[@]}
declare A=1; RUN $A
declare A=1 B=2; RUN $A $B
declare A; RUN "[$A]"
A=1; declare A; RUN "[$A]"
declare -i A=1+2; RUN $A
declare -i A; A=3*4; A+=1; RUN $A
declare -i A; A=x; RUN $A
declare -i A=5; A+=5; RUN $A
declare -i A=1; declare +i A; A=1+1; RUN $A
declare -i A; A=1/0; RUN "$A"
declare -l A=ABC; RUN $A
declare -u A=abc; A+=d; RUN $A
declare -u A; A=x; RUN $A
declare -c A=abc; RUN $A
declare -r A=1; A=2; RUN $A
readonly A=1; A=2; RUN $A
readonly A=1; A=2 RUN $A
readonly A=1; unset A; RUN $A
A=1; readonly A; A+=1; RUN $A
readonly A=1; for A in 2 3; do B=1; done; RUN $A "$B"
readonly A=1
  A=2
  RUN $A
readonly A=1; { A=2; B=3; }; RUN $A "$B"
readonly A=1; read A <<< 2; RUN $A
readonly A=1; ((A = 2)); RUN $A
declare -n R=A; A=1; RUN $R; R=2; RUN $A
declare -n R=A; R=(1 2); RUN ${A[1]}
declare -n R=P[1]; P=(1 2); RUN $R
declare -n R=A; A=1; unset R; RUN "[$A]"
declare -n R=A; RUN ${!R}
declare -x A=1; RUN $A
declare -a A; A[1]=x; RUN "${A[@]}"
declare -a A='(1 2)'; RUN "${A[@]}"
declare -a A=(1 "2 3"); RUN "${A[@]}"
declare -A M; M[a]=1; RUN ${M[a]}
declare "A=1 2"; RUN "$A"
A='x y'; declare B=$A; RUN "$B"
A='x y'; export B=$A; RUN "$B"
A='x y'; local_=$A; RUN "$local_"
N=A; declare $N=5; RUN $A
N=A; declare "$N=5 6"; RUN "$A"
N=A; export $N=5; RUN $A
N=A; printf -v $N 5; RUN $A
N=A; read $N <<< 5; RUN $A
N=A; eval $N=5; RUN $A
N=A; eval "$N='5 6'"; RUN "$A"
N=A; $N=5; RUN "[$A]"
typeset A=1; RUN $A
typeset -i A=2*3; RUN $A
export A=1; RUN $A
export A; A=1; RUN $A
export -n A=1; RUN $A
unset -v A; RUN "[$A]"
A=1; B=2; unset A B; RUN "[$A$B]"
unset 1A; RUN a
A=~; RUN "${A:+set}"
A=$(echo 'a  b'); RUN $A "$A"
A="1
  2"; RUN $A
A='a b' B=$A; RUN "$B"
A=*; RUN "$A"
A={1,2}; RUN $A
A={1..3}; RUN $A
A=a\ b; RUN "$A"
A='"a b"'; RUN $A
A="'a b'"; RUN $A
A='$B'; B=1; RUN $A "$A"
A='\n'; RUN "$A" $A
A=`echo x`; RUN $A
A=1;B=2;RUN $A$B
A=x; RUN ${A}y $Ay "$A"y $A.y $A-y $A/y
A_1=x; RUN $A_1 ${A}_1
A=1 : ; RUN "[$A]"
set -a; A=1; RUN $A
set -k; A=0; RUN A=1 $A
A[0]=x; RUN $A ${#A[@]}
A=0; alias ll='A=1'; ll; RUN "$A"
shopt -s expand_aliases
  alias ll='A=1'
  ll
  RUN "[$A]"
## arrays
P=(a b c); RUN ${P[0]} ${P[2]} $P ${P}
P=(a b c); RUN ${P[-1]} ${P[-3]}
P=(a b c); RUN "[${P[3]}]" "[${P[9]}]"
P=(a b c); RUN "[${P[-4]}]"
P=(a 'b c' d); RUN ${P[@]}
P=(a 'b c' d); RUN "${P[@]}"
P=(a 'b c' d); RUN ${P[*]}
P=(a 'b c' d); RUN "${P[*]}"
P=(a 'b c' d); RUN x"${P[@]}"y
P=(a 'b c' d); RUN --x="${P[@]}"
P=(); RUN "${P[@]}" ${P[@]} ${#P[@]}
P=(); RUN "${P[*]}" "x${P[@]}"
P=(''); RUN "${P[@]}" ${P[@]} ${#P[@]}
P=('' a); RUN ${P[@]} "${P[@]}"
P=(a b c); RUN ${#P[@]} ${#P[*]} ${#P[0]} ${#P}
P=(a b c); RUN ${!P[@]} "${!P[*]}"
P=(a b c); RUN "${P[@]:1}" "${P[@]:1:1}" "${P[@]:0:2}"
P=(a b c); RUN ${P[@]:1} ${P[*]:1:1} "${P[*]:1}"
P=(a b c); RUN "${P[@]: -1}" "${P[@]: -2:1}" "${P[@]:5}" end
P=(a b c); RUN "${P[@]:0:0}" end
P=(a b c); I=1; RUN "${P[@]:I}" "${P[@]:$I:1}" "${P[@]:I+1}"
P=(a b c); RUN ${P[0]:0:1} "${P[1]:-x}"
P=(a b); P+=(c 'd e'); RUN "${P[@]}"
P=(a b); P+=c; RUN "${P[@]}"
P=(a b); P[1]=x; P[2]=y; RUN "${P[@]}"
P=(a b); P[5]=x; RUN "${P[@]}" ${#P[@]} ${!P[@]} ${P[-1]}
P=(a b c); P[-1]=x; RUN "${P[@]}"
P=(a b c); P[-9]=x; RUN "${P[@]}"
P=(a b c); P[1]+=x; RUN "${P[@]}"
P=(a b c); I=1; P[I]=x; P[$I+1]=y; P[I-1]=z; RUN "${P[@]}"
P=(a b c); unset 'P[1]'; RUN "${P[@]}" ${#P[@]} ${!P[@]}
P=(a b c); unset P[0]; RUN "${P[@]}" "[$P]"
P=(a b c); unset 'P[-1]'; RUN "${P[@]}"
P=(a b c); unset P; RUN "[${P[@]}]"
P=(a b c); unset 'P[1]'; P+=(d); RUN "${P[@]}" ${!P[@]}
P=(a b c); unset 'P[1]'; RUN "${P[@]:1}" "${P[@]:1:1}"
P=([2]=c [0]=a); RUN "${P[@]}" ${!P[@]}
P=([2]=c d [0]=a b); RUN "${P[@]}" ${!P[@]}
P=(a [3]=b c); RUN "${P[@]}" ${!P[@]}
P=([1]="x y" ['2']=z); RUN "${P[@]}"
I=2; P=([I]=c [$I+1]=d); RUN ${!P[@]}
P=(a b); P=("${P[@]}" c); RUN "${P[@]}"
P=(a b); P=(x "${P[@]}"); RUN "${P[@]}"
P=(a b); Q=("${P[@]}"); P[0]=z; RUN "${Q[@]}"
P=($(echo a b)); RUN ${#P[@]} ${P[1]}
P=($(seq 3)); RUN "${P[@]}"
A='a b'; P=($A); RUN ${#P[@]}
A='a b'; P=("$A"); RUN ${#P[@]}
IFS=,; A=a,b; P=($A); RUN ${#P[@]}
A=a,b; IFS=, P=($A); RUN ${#P[@]}
A=a,b,c; P=(${A//,/ }); RUN "${P[@]}"
P=({1..3} x{a,b}); RUN "${P[@]}"
P=(*.none); RUN "${P[@]}" ${#P[@]}
P=(
  --x 1
  # a comment
  --y "2 3" # another
  )
  RUN "${P[@]}"
P=(--x 1 \
  --y 2)
  RUN "${P[@]}"
P=(a;b); RUN "${P[@]}"
P=(a b); RUN "${P[@]/#/--}"
P=(a b); RUN "${P[@]/%/.x}" "${P[@]/a/z}" "${P[@]//b}"
P=(a.x b.x); RUN "${P[@]%.x}" "${P[@]#a}" "${P[@]##*.}"
P=(ab cd); RUN "${P[@]^}" "${P[@]^^}" "${P[@]^^[a-c]}"
P=(AB); RUN "${P[@],,}"
P=(a 'b c'); RUN "${P[@]@Q}"
P=(a 'b c'); RUN ${P[*]@Q}
P=(a b); RUN "${P[*]/#/--}" ${P[*]/#/--}
P=(); RUN "${P[@]:-none}" "${P[@]-none}"
P=(''); RUN "${P[@]:-none}" "${P[@]-none}"
P=(a b); RUN "${P[@]:-none}" ${P[@]:+some} "${P[@]+"${P[@]}"}"
P=(); RUN ${P[@]:+some} ${P[@]+some} end
P=(a b c); RUN "${P[${#P[@]} - 1]}" ${P[$((1 + 1))]} ${P[P[0]]}
P=(1 2 0); RUN ${P[${P[2]}]} ${P[P[0]]}
P=(a b); I=1; RUN "${P[I]}" "${P[$I]}" ${P[I-1]} ${P[i=0]}
P=(3 4); RUN $((P[0] + P[1])) $((${P[0]} * 2)) $((P))
P=(3 4); ((P[0]++)); ((P[1] += 5)); RUN "${P[@]}"
P=(a b); for i in ${!P[@]}; do Q[$i]=${P[i]}x; done; RUN "${Q[@]}"
P=a; P+=(b); RUN "${P[@]}"
P=(a b); declare -a P; RUN "${P[@]}"
P=(a b); readonly P; P+=(c); RUN "${P[@]}"
P=(a b); [[ " ${P[*]} " == *" b "* ]] && A=1; RUN "$A"
P=(a b); [[ -v P[1] ]] && A=1; [[ -v P[5] ]] && B=1; RUN "$A" "$B"
P=(a b); (P+=(c)); RUN "${P[@]}"
declare -A M=([a]=1); RUN ${M[a]} ${#M[@]} ${!M[@]} "[${M[b]}]"
declare -A M=([a]=1 [b]=2 [c]=3); RUN ${M[a]} ${M[c]} ${#M[@]}
declare -A M=([a]=1 [b]=2 [c]=3 [d]=4); RUN ${M[@]}
declare -A M=([zeta]=1 [alpha]=2 [mid]=3); RUN "${!M[@]}"
declare -A M=([zeta]=1 [alpha]=2); for k in "${!M[@]}"; do B+=$k; done; RUN $B
declare -A M; M["a b"]=1; K='a b'; RUN ${M[$K]} "${M["a b"]}" "${!M[@]}"
declare -A M; M[a]=1; M[a]+=2; RUN ${M[a]}
declare -A M=([a]=1); M+=([b]=2); RUN ${M[b]} ${#M[@]}
declare -A M=([a]=1); M=([b]=2); RUN "[${M[a]}]" ${M[b]}
declare -A M=([a]=1 [b]=2); unset 'M[a]'; RUN ${#M[@]} ${!M[@]}
declare -A M=([a]=1); [[ -v M[a] ]] && A=1; [[ -n ${M[b]} ]] && B=1; RUN "$A$B"
declare -A M=(a 1 b 2); RUN ${M[b]}
declare -A M=([a]=1); RUN "[$M]" "[${M[0]}]"
declare -A M=([7]=x [I]=y); I=7; RUN ${M[I]} ${M[$I]}
declare -A M=([a]=1); ((M[a]++)); RUN ${M[a]}
M[a]=1; M[b]=2; RUN ${M[a]} ${#M[@]}
M=([a]=1 [b]=2); RUN "${M[@]}"
## brace expansion
RUN {a,b} x{a,b}y {a,b}{1,2}
RUN {1..3} {3..1} {01..03} {1..10..3} {10..1..4}
RUN {a..e} {e..a} {a..e..2} {A..C}
RUN {-1..1} {1..3..0} {1..3..-1} {001..3}
RUN {a} {} {a,} {,a} {,} a{,b}
RUN {a,{b,c}} {a,b{1..2}} {{a,b},{c,d}}
RUN "{a,b}" '{1..2}' {a,"b c"} {a,b\,c} \{a,b}
RUN {1..a} {a..1} {1..} {..2} {1.5..2} {1...3}
A=2; RUN {1..$A} {$A,x} $A{a,b} ${A}{a,b}
RUN --x={1,2} --{a,b} {--x,1}
RUN {a b,c} {a,b c}
RUN ${A:-{a,b}} $A{x,y}
A={a,b}; B={1..2}; RUN $A $B
P=({1..3}); RUN ${#P[@]}
for i in {1..3}{a,b}; do B+=$i; done; RUN $B
set +B; RUN {a,b} {1..3}
RUN a{b,c}d{e,f} {{1..2},x}
RUN {a,b}.{c,d} file.{bin,idx}
RUN {"a",'b'} {a,$(echo b)} {$((1 + 1)),3}
RUN {a,b}"x y" pre{a,b}post{
RUN {1..2}{
RUN }{a,b} a}b {a,b}}
RUN {x..z}1 {Z..a..40}
eval RUN {1..2}
[[ a == {a,b} ]] && A=1; RUN "$A"
case a in {a,b}) A=1;; esac; RUN "$A"
## tilde
RUN x~ a:~ ~+x
A=x:~; RUN ${A:+set}
RUN "~/x" '~' \~/x
[[ ~ == "$HOME" ]] && A=1; RUN "$A"
RUN --x=~/y
## parameter expansion
A=x; RUN ${A:-d} ${A-d} ${B:-d} ${B-d}
A=; RUN "${A:-d}" "${A-d}" ${A:-} end
A=x; RUN ${A:+d} ${A+d} "[${B:+d}]" "[${B+d}]"
A=; RUN "[${A:+d}]" "[${A+d}]"
RUN ${B:=d} $B ${C=e} $C
A=; RUN ${A:=d} $A
A=; RUN "${A=d}" "$A"
: ${B:=d}; RUN $B
: "${B:=d e}"; RUN $B "$B"
A=x; RUN ${A:?no} ${A?no}
unset A; RUN ${A:?no}
unset A; : ${A:?no}; RUN a
A=; : "${A:?no}"; RUN a
A=; : "${A?no}"; RUN a
unset A; echo ${A?} ; RUN a
RUN ${A:-a b} "${A:-a b}" ${A:-"a b"}
RUN ${A:-'a b'} "${A:-'a b'}" "${A:-"a b"}"
B=y; RUN ${A:-$B} ${A:-${B:-c}} ${A:-${B}x}
RUN ${A:-$(echo d)} ${A:-$((1 + 1))} ${A:-`echo e`}
RUN ${A:-a}b c${A:-d} "${A:-\$x}" ${A:-\}}
RUN ${A:-\a} "${A:-\a}" ${A:-"\a"}
RUN ${A:-*} "${A:-}" end
RUN ${A-} ${A:+x} end
RUN "${A-}" "${A:+x}" end
A='p q'; RUN ${A:+$A} "${A:+$A}" ${A:+"$A"} ${A:+--x $A}
A='p q'; RUN ${A:+--x "$A"} ${B:---y "$A"}
A=abc; RUN ${#A} ${#B}
A='a b'; RUN ${#A}
A=é; RUN ${#A}
A=abcdef; RUN ${A:2} ${A:0:2} ${A:2:2} ${A:1:99} "[${A:9}]"
A=abcdef; RUN ${A: -2} ${A: -3:2} ${A:(-1)} ${A:0:-1} ${A:1:-2}
A=abcdef; RUN "[${A: -9}]" "[${A:2:0}]" "[${A:6}]" "[${A:7}]"
A=abc; RUN ${A:2:-2}
A=abcdef; I=2; RUN ${A:I} ${A:$I:1} ${A:I+1:I} ${A:$((I - 1))}
A=abcdef; RUN ${A::2} ${A:1:} ${A:}
A='a b c'; RUN ${A:1} "${A:1}" ${A:0:2}x
A=a.b.c; RUN ${A#*.} ${A##*.} ${A%.*} ${A%%.*}
A=/x/y/z.py; RUN ${A##*/} ${A%/*} ${A%.py} ${A#/x}
A=abc; RUN ${A#b} ${A%b} ${A#} ${A%} ${A##*} end
A=aabb; RUN ${A#a*b} ${A##a*b} ${A%a*b} ${A%%a*b}
A=a1b2; RUN ${A#[a-z]} ${A#?} ${A%[0-9]} ${A#[!0-9]}
A=a1b2; RUN ${A#[[:alpha:]]} ${A%[[:digit:]]} ${A##*[[:alpha:]]}
A='a*b'; RUN "${A#a\*}" "${A#"a*"}" "${A#a'*'}" "${A%\*b}"
A=a/b; B=a/; RUN ${A#$B} "${A#"$B"}" ${A#${B}}
A='ab'; B='?'; RUN "${A#$B}" "${A#"$B"}"
A="x y"; RUN ${A#x } "${A% y}" "${A#* }"
A=-x; RUN ${A#-} ${A##-}
A=abab; RUN ${A/b/x} ${A//b/x} ${A/#a/x} ${A/%b/x} ${A/c/x}
A=abab; RUN ${A/b} ${A//b} ${A//b/} ${A/#/x} ${A/%/x}
A=abab; RUN ${A/a*/x} ${A//?/x} ${A//[a]/x} ${A//[!a]/x} ${A/*b/x}
A=a/b/c; RUN ${A//\//-} ${A//\//} ${A/\/b/} ${A////-}
A='a b c'; RUN ${A// /-} "${A// /,}" "${A/ /}"
A=a,b; RUN ${A//,/ } "${A//,/ }"
A=a.b; RUN ${A//./-} ${A/./-}
A=ab; B=b; C=x; RUN ${A/$B/$C} ${A/"$B"/"$C"} ${A/b/${C}y}
A=ab; RUN ${A/b/"x y"} "${A/b/"x y"}" ${A/b/'x y'} "${A/b/'x y'}"
A=ab; RUN ${A/b/\&} ${A/b/'&'} "${A/b/\\}"
A=ab; RUN ${A/b/[&]}
A=aXbX; RUN ${A/#X/y} ${A/%X/y} ${A/#*X/y} ${A/%X*/y}
A='a?b'; RUN "${A/\?/x}" "${A/'?'/x}" "${A//?/x}"
A=; RUN "[${A/a/b}]" "[${A/#/b}]" "[${A/*/b}]"
A=aaa; RUN ${A//aa/b} ${A/+(a)/b}
shopt -s extglob; A=aab; RUN ${A/+(a)/x} ${A##+(a)} ${A%%@(b|c)} ${A/!(a)/y}
A=aBc; RUN ${A^} ${A^^} ${A,} ${A,,} ${A~} ${A~~}
A=abc; RUN ${A^^[ab]} ${A^b} ${A^^?} ${A^a}
A=ABC; RUN ${A,,[AB]} ${A,A}
A='ab cd'; RUN "${A^}" "${A^^}" ${A^}
A=éa; RUN ${A^^}
A='a b'; RUN "${A@Q}" ${A@Q}
A=abc; RUN ${A@U} ${A@u} ${A@L}
A='a\tb'; RUN "${A@E}"
A='$B'; B=1; RUN ${A@P}
A=1; RUN ${A@A} "[${A@a}]"
N=A; A=5; RUN ${!N} "${!N}" ${!N:-x} ${!N#5} end
N=A; RUN ${!N:-x}
N='P[1]'; P=(a b); RUN ${!N}
N='P[@]'; P=(a 'b c'); RUN "${!N}"
N=1; set -- z; RUN ${!N}
A1=x A2=y; RUN ${!A1*} ${!A*} "${!A@}"
A=x; RUN "${A}" "${A }"
RUN ${A B}
RUN ${-x}
A=1; RUN ${A:-1}${A:-2} "${A}${B}"
A=a B=b; RUN $A$B "$A$B" ${A}${B} $A"$B"
A='a b' B='c d'; RUN $A$B "$A"$B $A"$B"
A='a ' B=' b'; RUN $A$B
A='*.none'; RUN $A "$A"
A=x; RUN $A[0] ${A[0]} ${A[1]}end $A{y,z}
A="--x 1 --y '2 3'"; RUN $A
A='--x 1
  --y 2'
  RUN $A "$A"
U= ; RUN $U --x "$U"
RUN --x ${RUN_ID} --y "$RUN_ID" z$DATA_PATH
A=$RUN_ID; RUN $A "$A" x${A}y
A="--x $RUN_ID --y 2"; RUN $A
A="$(date) 1"; RUN --x $A --y 2
P=(--x $RUN_ID --y 2); RUN "${P[@]}" ${#P[@]}
P=(--x "$RUN_ID" --y 2); RUN ${P[@]}
A=(a $(hostname)); A+=(c); RUN "${A[@]:1}"
A=run-$(date +%s); RUN --name $A --out "$A/x" ${A}.log
A=$RUN_ID,b; IFS=,; RUN $A
RUN ${RUN_ID:0:3} ${DATA_PATH##*/} ${MASTER_ADDR%%:*} ${RUN_ID^^}
RUN $((RUN_ID + 1)) ${#RUN_ID}
A=$RUN_ID; B="${A}-x $A"; RUN $B
for i in $RUN_ID b; do B+=" --n $i"; done; RUN $B
A=$RUN_ID; if [ "$A" = x ]; then B=1; else B=2; fi; RUN $B
A=$RUN_ID; [ -n "$A" ] && B=1; RUN "$B"
A=$RUN_ID; case $A in x*) B=1;; *) B=2;; esac; RUN $B
A="$RUN_ID"; [[ $A == x ]] || B=1; RUN "$B"
A=x$RUN_ID; [ -z "$A" ] && B=1; RUN "$B"
A=x$RUN_ID; [[ $A == y* ]] && B=1; RUN "$B"
A=${RUN_ID}b; RUN "${A%b}" ${A#a} "${A/b/c}"
read -r A B <<< "$RUN_ID x"; RUN $A $B
set -- $RUN_ID b; shift; RUN "$@"
IFS=: read -r A B <<< "$RUN_ID:6"; RUN $B
## arithmetic
RUN $((1 + 2)) $((2 * 3)) $((7 / 2)) $((7 % 3)) $((2 ** 10)) $((1 - 5))
RUN $((-7 / 2)) $((-7 % 3)) $((7 / -2)) $((7 % -3)) $((-2 ** 2)) $((2 ** 3 ** 2))
RUN $((1 << 4)) $((256 >> 2)) $((6 & 3)) $((6 | 3)) $((6 ^ 3)) $((~5)) $((!5)) $((!0)) $((-1 >> 1))
RUN $((1 < 2)) $((2 <= 1)) $((3 == 3)) $((3 != 3)) $((1 && 0)) $((1 || 0))
RUN $((1 ? 2 : 3)) $((0 ? 2 : 3)) $((1 ? 0 ? 4 : 5 : 6)) $((1, 2))
RUN $((010)) $((0x1f)) $((16#ff)) $((2#101)) $((36#z)) $((64#_)) $((0X1F))
RUN $((08)); RUN a
RUN $((2#9)); RUN a
RUN $((1 / 0)); RUN a
RUN $((1 % 0))
RUN $((2 ** -1))
RUN $((1 +)); RUN a
RUN $((1 2))
RUN $(( )) "$(())"
RUN $((9223372036854775807 + 1)) $((-9223372036854775808 - 1))
RUN $((9223372036854775808)) $((2 ** 63)) $((2 ** 64)) $((1 << 63)) $((1 << 64))
RUN $((3000000000 * 4000000000)) $((-9223372036854775808 / -1))
RUN $((1.5))
A=3; RUN $((A)) $(($A)) $((A + B)) $(("$A" + 1)) $((A*A))
A=3; RUN $((A++)) $A $((++A)) $A $((A--)) $((--A)) $A
A=3; RUN $((A += 2)) $A $((A *= 2)) $((A -= 1)) $((A /= 2)) $((A %= 3)) $((A <<= 2)) $((A |= 1)) $((A &= 5)) $((A ^= 2))
RUN $((A = 5)) $A $((B = A = 2)) $A$B
A=B; B=7; RUN $((A)) $((A + 1))
A='1 + 2'; RUN $((A * 2)) $(($A * 2))
A=010; RUN $((A)) $((10#$A)) $((10#08))
A=1.5; RUN $((A))
A=x; RUN $((A + 1))
A='a b'; RUN $((A)); RUN z
A=; RUN $((A + 1)) $((A))
A=' 5 '; RUN $((A + 1))
A=-3; RUN $((-A)) $((- -A)) $((+A)) $((1 - -1)) $((1--1)) $((!A))
RUN $(((1 + 2) * 3)) $((1 + (2 * 3))) $((((4))))
RUN $((1+1))$((2+2)) x$((3))y
RUN $[1 + 2] $[ 2*3 ]
RUN $((5 > 3 ? 1 : 2)) $(( 1 == 1 ? 10 : 20 ))
RUN $((0 && (A = 1))) "[$A]"; RUN $((1 || (B = 1))) "[$B]"
RUN $((0 ? (A = 1) : 2)) "[$A]" $((1 ? 2 : (B = 1))) "[$B]"
A=2; ((A++)); RUN $A
A=2; ((A > 1)) && B=1; RUN "$B"
A=2; ((A -= 2)) || B=1; RUN "$B"
((1 / 0)) || B=1; RUN "$B"
((A = 3, B = A * 2)); RUN $A $B
((A[2] = 5)); RUN ${!A[@]} ${A[2]}
let A=3; RUN $A
let "A = 3 + 4"; RUN $A
let A=1 B=A+1; RUN $A $B
let A=0 || B=1; RUN $A "$B"
let A++ A+=5; RUN $A
let A=2*3; RUN $A
A=5; B=$((A > 3 && A < 9)); RUN $B
A=8; N=2; RUN $((A / N)) $((A*N)) $((A%N)) $((  A  ))
RUN $((4 * $(echo 2))) $((${X:-3} + 1)) $((${#LAUNCHED} + 1))
P=(4 5); RUN $((P[1] * 2)) $((${#P[@]} - 1))
declare -A M=([a]=4); RUN $((M[a] + 1)) $((${M[a]} + 1))
A=1; A=$((A + 1)); A=$A$((A)); RUN $A
RUN $((1 +
  2))
if ((0)); then A=1; else A=2; fi; RUN $A
if (( 1 )); then A=1; fi; RUN $A
A=3; while ((A)); do ((A--)); B+=x; done; RUN $A $B
RUN $((0x)) a
RUN $((1#0)) a
RUN $((a b))
RUN $((1 = 2))
RUN $(('5' + 1))
RUN $((A?B:C))
RUN $((~0)) $((~~3)) $((! ! 3)) $((- - 3))
RUN $((5 / 2 * 2)) $((5 * 2 / 2)) $((2 + 3 * 4 - 1)) $((1 | 2 ^ 3 & 4)) $((1 << 2 + 1)) $((3 > 2 == 1))
A=5; RUN $((A+++1)) $((A---1)) $((A++ + ++A)) $A
## command substitution
RUN $(echo a b) "$(echo a b)" `echo c`
RUN $(echo "a  b") "$(echo "a  b")"
RUN "$(printf 'a\nb\n\n')" $(printf 'a\nb\n')
RUN $(printf '%s-%s\n' a b c) end
RUN $(printf '%03d' 5) $(printf '%x' 255) $(printf '%5s|' a) $(printf '%-5s|' a) $(printf '%.2f' 1.005)
RUN $(printf 'a%%b') $(printf '%s') end "$(printf '%b' 'a\tb')" $(printf '%q' 'a b')
RUN $(printf %d 010) $(printf %d 0x1f) $(printf %d "'A") $(printf %c abc) $(printf %o 8)
RUN $(printf %d x)
RUN $(printf '%s,' 1 2 3) $(printf '%.3s' abcdef) $(printf '%*d' 4 2)
RUN $(printf '%e' 1500) $(printf '%g' 0.0001) $(printf '%.1e' 0.00003)
RUN "$(echo -n a)" "$(echo -e 'a\tb')" "$(echo 'a\tb')" "$(echo -E 'a\tb')" "$(echo -nx)" "$(echo -- a)"
RUN "$(echo -e 'a\nb')" $(echo -ne 'x\ty') "$(echo -e '\x41\0101\c no')" "$(echo)"
RUN $(seq 3) $(seq 2 4) $(seq 1 2 7) $(seq 3 -1 1) $(seq 5 1) end
RUN $(seq -s, 3) $(seq -w 8 10) $(seq -f '%02g' 2) $(seq 0 0.5 1)
RUN "$(seq 3)"
RUN $(echo $(echo a)) $(echo `echo b`) "$(echo "$(echo 'c d')")"
A=1; RUN $(A=2; echo $A) $A
A=1; RUN $(echo $A; echo $((A + 1)))
RUN $(true) "$(true)" $(:) end
RUN "$(false)" end
RUN x$(echo a b)y "x$(echo a b)y"
RUN $(echo '*') "$(echo '*')"
RUN $(echo a; exit 1) b
RUN $(echo a # comment
  ) b
RUN $(
  echo a
  ) b
RUN $(case x in x) echo y;; esac) $(if true; then echo z; fi)
RUN $(for i in 1 2; do echo $i; done)
RUN $((echo a); echo b)
RUN $(cat <<< x) $(cat <<EOF
  y z
  EOF
  )
echo x > .in; RUN $(<.in) end
RUN $(basename /a/b.py) $(basename /a/b.py .py) $(dirname /a/b/c) $(dirname a) $(basename a/)
RUN $(date) $(hostname -s) "$(whoami)" `date +%Y`
A=$(echo 'x  y'); RUN $A "$A"
A=$(false) || B=1; RUN "$B"
A=$(echo a) && B=1; RUN "$B"
if A=$(false); then B=1; else B=2; fi; RUN $B
B=$(A=$(echo "a)"); echo "$A"); RUN "$B"
RUN "`echo \"a b\"`" `echo '$A'` `echo \$A` `echo \\\\`
IFS=,; RUN $(echo a,b) "$(echo a,b)"
RUN $(echo -) $(echo "") end
RUN $(pwd | wc -l)
RUN $(echo a b c | wc -w) $(echo abc | head -c 2)
RUN $(echo {a,b}) $(echo "{a,b}") $(echo {1..3})
RUN $(expr 1 + 2) end
RUN --n $(echo $RUN_ID) $(nproc 2> .err || echo 8)
## splitting and globs
A='a b	c'; RUN $A
IFS=,; A='a,b c,,d'; RUN $A
IFS=,; A=',a,'; RUN $A
IFS=', '; A='a, b ,c'; RUN $A
IFS=:; A=a:b; RUN $A "$A" x:y ${B:-p:q}
IFS=; A='a b'; RUN $A
IFS=$'\n'; A=$'a b\nc'; RUN $A
IFS=' '; A=$'a b\nc'; RUN $A
IFS=x; A=axb; RUN $A axb
IFS=0; RUN $((100 + 5))
IFS=-; RUN $(echo a-b) ${B:-c-d} --x-y
IFS=,; P=(a,b c); RUN ${P[@]} ${P[*]} "${P[*]}"
IFS=,; set -- a,b c; RUN $@ $* "$*"
A='a,b'; IFS=, ; RUN $A; unset IFS; RUN $A
OLD=$IFS; IFS=,; A=a,b; P=($A); IFS=$OLD; RUN "${P[@]}" ${#P[@]}
IFS=, read -ra P <<< "a,b c,d"; RUN "${P[@]}" ${#P[@]}
IFS=,; A=a,b; for i in $A; do B+="[$i]"; done; RUN "$B"
IFS=,; A=a,b; B=$A; RUN "$B"
IFS=,; A=a,b; case $A in a,b) B=1;; esac; RUN "$B"
IFS=,; A=a,b; [ $A = a ] ; RUN $?
IFS=,; A=a,b; [[ $A == a,b ]] && B=1; RUN "$B"
RUN *.none ?.none [ab].none "*.none"
shopt -s nullglob; RUN *.none end
shopt -s failglob; RUN *.none end; RUN a
shopt -s nullglob; P=(*.none); RUN ${#P[@]}
shopt -s nullglob; A='*.none'; RUN $A "$A" end
shopt -s nullglob; for A in *.none; do B=1; done; RUN "[$B]"
shopt -s nullglob; RUN --x=[1] a? "b?" {c?,d}
set -f; RUN *.none
set -f; A='a b'; RUN $A
: > a.none; RUN *.none
: > a.none; A='*.none'; RUN $A "$A"
: > a.none; : > b.none; P=(*.none); RUN ${#P[@]}
: > a.none; for A in *.none; do B+=$A; done; RUN $B
: > a.none; set -f; RUN *.none
: > a.none; GLOBIGNORE='*.none'; RUN *.none
: > a.none; RUN "*".none \*.none [a].none
shopt -s extglob
  RUN +(a).none @(a|b)
shopt -s globstar; RUN **/x.none
RUN [a] a[1] --x=[1,2] '[a]'
A=[x]; RUN $A
## redirections
RUN a > .out
RUN a > .out 2>&1
RUN a 2>&1 | tee .out
RUN a &> .out
RUN a >> .out 2> .err
RUN a < none.txt; RUN b
RUN > .out a
> .out RUN a
RUN a 2>.err b
RUN a 1> .out b 2
RUN a2> .out b
RUN a >.out b >.out2 c
RUN a >| .out
RUN a <> .out
RUN a > none/x; RUN b
RUN a {fd}> .out
RUN a 3> .out 4>&3
RUN a >&2 b
RUN a 2>&- b
exec > .out; RUN a
exec 3> .out; RUN a
exec > none/x; RUN a
exec < none.txt; RUN a
exec 2>&1; RUN a
{ RUN a; } > .out
( RUN a ) 2>&1 | tee .out
echo a > .out; RUN b
set -C; : > .out; RUN a > .out
echo 'x y' > .in; read A B < .in; RUN $B $A
echo x > .in; RUN $(cat .in) end
echo x > .in; A=$(< .in); RUN $A
printf '1\n2\n' > .in; while read A; do B+=$A; done < .in; RUN $B
cat > .env <<EOF
  A=5
  EOF
  . ./.env
  RUN "$A"
echo 'A=7' > .env; source ./.env; RUN "$A"
source ./none.env; RUN a
## here-documents and read
read A <<< x; RUN $A
read A B <<< "x y z"; RUN $A "$B"
read A B C <<< "x y"; RUN $A $B "[$C]"
read A <<< "  x  y  "; RUN "$A"
read <<< "  x  y  "; RUN "$REPLY"
IFS= read A <<< "  x  "; RUN "$A"
IFS=, read A B <<< "x,y,z"; RUN $A $B
IFS=, read A B <<< "x,,z"; RUN $A "[$B]"
IFS=, read A B C <<< "x,y,"; RUN "[$C]"
IFS=', ' read A B <<< "x , y"; RUN "[$A]" "[$B]"
IFS=, read -a P <<< "x,y,,z,"; RUN ${#P[@]} "${P[@]}"
read -a P <<< "x  y z"; RUN ${#P[@]} "${P[@]}"
read -ra P <<< "x\ y z"; RUN ${#P[@]} "${P[@]}"
read -a P <<< "x\ y z"; RUN ${#P[@]} "${P[@]}"
read -a P <<< "x * y"; RUN ${#P[@]}
read A <<< 'x\ty'; RUN "$A"
read -r A <<< 'x\ty'; RUN "$A"
read A <<< 'x\
  y'; RUN "$A"
read -d , A <<< "x,y"; RUN "$A"
read -d '' A <<< "x y"; RUN "$A"
read -n 2 A <<< "xyz"; RUN "$A"
read -N 2 A <<< "xyz"; RUN "$A"
read -p 'x? ' A <<< y; RUN $A
read -t 1 A <<< y; RUN $A
read -u 0 A <<< y; RUN $A
read -s A <<< y; RUN $A
read -rp x A <<< y; RUN $A
read -e A <<< y; RUN $A
read A <<< ""; RUN "[$A]" $?
read A B < <(echo x y); RUN $A $B
read A <<< "$(echo x y)"; RUN $A
read A <<< $(echo x; echo y); RUN "$A"
A='x  y'; read B <<< $A; RUN "$B"
A='x  y'; read B <<< "$A"; RUN "$B"
echo x | read A; RUN "[$A]"
shopt -s lastpipe; echo x | read A; RUN "[$A]"
read A B <<EOF
  x y
  z
  EOF
  RUN $A $B
read -r -d '' A <<'EOF'
  --x 1
  --y $B
  EOF
  RUN $A
read -r -d '' A <<EOF || true
  --x 1 $RUN_ID
  EOF
  RUN $A
A=$(cat <<EOF
  --x 1
  --y 2
  EOF
  )
  RUN $A "$A"
B=3; A=$(cat <<EOF
  --x $B $((B + 1)) $(echo z) \$B \\ "q" 'r' `echo w`
  EOF
  )
  RUN $A
B=3; A=$(cat <<'EOF'
  --x $B \$B
  EOF
  )
  RUN $A
B=3; A=$(cat <<"EOF"
  --x $B
  EOF
  )
  RUN $A
A=$(cat <<-EOF
  	--x 1
  		--y 2
  	EOF
  )
  RUN $A
cat <<EOF > .out
  RUN no
  EOF
  RUN yes
cat <<EOF
  RUN no $(echo ')
  EOF
  RUN yes
cat << 'A B'
  RUN no
  A B
  RUN yes
cat <<A <<B
  x
  A
  RUN no
  B
  RUN yes
cat <<EOF; RUN a
  RUN no
  EOF
cat <<EOF
  x
   EOF
  EOF
  RUN yes
cat <<EOF
  x
RUN a <<EOF
  x
  EOF
bash <<EOF
  RUN a
  EOF
bash <<'EOF'
  A=1; RUN $A
  EOF
A=1; bash <<EOF
  A=2; RUN $A \$A
  EOF
export A=1; bash <<'EOF'
  RUN $A
  EOF
A=1; bash <<'EOF'
  RUN "[$A]"
  EOF
sh <<EOF
  RUN a
  EOF
bash -s x <<'EOF'
  RUN "$1"
  EOF
mapfile -t P <<< "x y"; RUN "${P[@]}" ${#P[@]}
mapfile P <<< x; RUN "${P[@]}"
mapfile -t <<< x; RUN "${MAPFILE[@]}"
readarray -t P <<EOF
  x y
  z
  EOF
  RUN "${P[@]}" ${#P[@]}
mapfile -t P < <(seq 3); RUN "${P[@]}"
mapfile -t P < <(printf '%s\n' a 'b c'); RUN "${P[@]}"
mapfile -t P <<< "$(seq 3)"; RUN "${P[@]}"
mapfile -t -n 1 P <<< $'x\ny'; RUN "${P[@]}"
mapfile -t -s 1 P <<< $'x\ny'; RUN "${P[@]}"
mapfile -t -O 1 P <<< x; RUN ${!P[@]}
mapfile -d , -t P <<< x,y; RUN "${P[@]}"
P=(a b c); mapfile -t P <<< x; RUN "${P[@]}"
while read -r A; do P+=("$A"); done < <(seq 2); RUN "${P[@]}"
while IFS== read -r A B; do C+="$A:$B;"; done <<< $'a=1\nb=2=3'; RUN "$C"
while IFS= read -r A; do C+="[$A]"; done <<< "  x  "; RUN "$C"
while read -r A; do C+=$A; done <<< $'1\n2'; RUN $C
while read -r A || [ -n "$A" ]; do C+=$A; done < <(printf '1\n2'); RUN $C
while read -r A; do C+=$A; done < <(printf '1\n2'); RUN $C "[$A]"
while read -r A; do [ $A = 2 ] && break; done <<< $'1\n2\n3'; RUN $A
{ read A; read B; } <<< $'1\n2'; RUN $A $B
## conditions
[ a = a ] && A=1; RUN "$A"
[ a == b ] || A=1; RUN "$A"
[ a != b ] && A=1; RUN "$A"
[ -z "" ] && [ -n a ] && A=1; RUN "$A"
[ "" ] || A=1; RUN "$A"
[ a ] && A=1; RUN "$A"
[ ] || A=1; RUN "$A"
[ -n ] && A=1; RUN "$A"
[ -z ] && A=1; RUN "$A"
[ -n $B ] && A=1; RUN "$A"
[ -z $B ] && A=1; RUN "$A"
[ $B = a ] ; RUN $?
B='a b'; [ $B = a ]; RUN $?
B='a b'; [ -n $B ]; RUN $?
[ 1 -eq 01 ] && A=1; RUN "$A"
[ 2 -lt 10 ] && [ 2 -le 2 ] && [ 3 -gt 2 ] && [ 3 -ge 3 ] && [ 1 -ne 2 ] && A=1; RUN "$A"
[ 1.5 -gt 1 ]; RUN $?
[ x -eq 0 ]; RUN $?
[ "" -eq 0 ]; RUN $?
[ ' 1 ' -eq 1 ]; RUN $?
[ -1 -lt 0 ] && A=1; RUN "$A"
[ 1+1 -eq 2 ]; RUN $?
[ ! a = b ] && A=1; RUN "$A"
[ ! "" ] && A=1; RUN "$A"
[ a = a -a b = b ] && A=1; RUN "$A"
[ a = b -o b = b ] && A=1; RUN "$A"
[ a = b -o b = b -a c = d ]; RUN $?
[ \( a = b -o b = b \) -a c = c ]; RUN $?
[ ! a = b -a c = d ]; RUN $?
[ a \< b ] && [ b \> a ] && A=1; RUN "$A"
[ B \< a ]; RUN $?
[ -v A ]; RUN $?
A=; [ -v A ]; RUN $?
[ a = a; RUN $?
[a = a ]; RUN $?
[ a= a ]; RUN $?
[ a =a ]; RUN $?
[ a -foo b ]; RUN $?
[ a = a b ]; RUN $?
test a = a && A=1; RUN "$A"
test -z ""; RUN $?
test; RUN $?
test a; RUN $?
[ -f none.txt ]; RUN $?
[ -d . ]; RUN $?
[ -e none.txt ] || A=1; RUN "$A"
: > .x; [ -f .x ] && A=1; RUN "$A"
mkdir .d; [ -d .d ] && A=1; RUN "$A"
[ -t 0 ]; RUN $?
[ -o errexit ]; RUN $?
[[ a == a ]] && A=1; RUN "$A"
[[ a = a && b != c ]] && A=1; RUN "$A"
[[ a == b || b == b ]] && A=1; RUN "$A"
[[ ! a == b ]] && A=1; RUN "$A"
[[ ( a == b || b == b ) && c == c ]] && A=1; RUN "$A"
[[ a == b && b == b || c == c ]] && A=1; RUN "$A"
[[ a == b || b == b && c == d ]]; RUN $?
[[ ! a == a || b == b ]]; RUN $?
[[ -z $B ]] && A=1; RUN "$A"
[[ -n $B ]]; RUN $?
B='a b'; [[ $B == 'a b' ]] && A=1; RUN "$A"
B='a b'; [[ $B == a* ]] && A=1; RUN "$A"
B='a*'; [[ abc == $B ]] && A=1; [[ abc == "$B" ]] && C=1; RUN "$A" "$C"
[[ abc == a?c ]] && [[ abc == [a-c]bc ]] && [[ abc == *c ]] && A=1; RUN "$A"
[[ abc == "a"* ]] && A=1; RUN "$A"
[[ 'a*' == a\* ]] && A=1; RUN "$A"
[[ abc == a\* ]]; RUN $?
[[ abc == *"b"* ]] && A=1; RUN "$A"
[[ a5 == a[[:digit:]] ]] && A=1; RUN "$A"
[[ aX == a[[:lower:]] ]]; RUN $?
[[ abc == @(abc|x) ]] && A=1; RUN "$A"
[[ abc == !(x) ]] && A=1; RUN "$A"
[[ aaa == +(a) ]] && A=1; RUN "$A"
[[ ABC == abc ]]; RUN $?
shopt -s nocasematch; [[ ABC == abc ]]; RUN $?
shopt -s nocasematch; [[ ABC =~ b ]]; RUN $?
shopt -s nocasematch; A=ABC; RUN ${A/b/x}
[[ a < b ]] && A=1; RUN "$A"
[[ b > a ]] && A=1; RUN "$A"
[[ 10 < 9 ]] && A=1; RUN "$A"
[[ B < a ]]; RUN $?
[[ a < B ]]; RUN $?
[[ 1+1 -eq 2 ]] && A=1; RUN "$A"
B=3; [[ B -eq 3 ]] && [[ $B -gt 2 ]] && A=1; RUN "$A"
[[ x -eq 0 ]] && A=1; RUN "$A"
[[ "" -eq 0 ]] && A=1; RUN "$A"
[[ 010 -eq 8 ]] && A=1; RUN "$A"
[ 010 -eq 10 ] && A=1; RUN "$A"
[[ 1.5 -gt 1 ]]; RUN $?
[[ abc =~ b ]] && A=1; RUN "$A"
[[ abc =~ ^a.c$ ]] && A=1; RUN "$A"
[[ abc =~ ^b ]]; RUN $?
[[ abc =~ "a.c" ]]; RUN $?
[[ a.c =~ a\.c ]]; RUN $?
[[ abc =~ a\.c ]]; RUN $?
[[ a12 =~ ([a-z])([0-9]+) ]]; RUN ${BASH_REMATCH[0]} ${BASH_REMATCH[2]} ${#BASH_REMATCH[@]}
[[ a12 =~ [0-9]+ ]] && A=$BASH_REMATCH; RUN $A
B='^a+$'; [[ aaa =~ $B ]] && A=1; [[ aaa =~ "$B" ]] && C=1; RUN "$A" "$C"
[[ a1 =~ ^[[:alpha:]][[:digit:]]$ ]] && A=1; RUN "$A"
[[ a =~ \d ]]; RUN $?
[[ d5 =~ \w+ ]]; RUN $?
[[ aab =~ (a+?)b ]]; RUN $?
[[ ab =~ a|b ]]; RUN $?
[[ "a b" =~ a\ b ]]; RUN $?
[[ ab =~ ^(a|b)+$ ]]; RUN $?
[[ a =~ [ ]]; RUN $?
[[ aaa =~ a{2} ]]; RUN $?
[[ 7b =~ ^([0-9]+)b$ ]] && A=${BASH_REMATCH[1]}; RUN $A
[[ a == a ]] || exit 1; RUN a
[[ -v A ]]; RUN $?
A=1; [[ -v A ]] && [[ -v B ]]; RUN $?
[[ -f none.txt ]] && A=1; RUN "[$A]"
[[ -o errexit ]]; RUN $?
[[ a ]] && A=1; RUN "$A"
[[ "" ]]; RUN $?
[[ $B ]]; RUN $?
[[ ]]; RUN a
[[ a == ]]; RUN a
[[ a -foo b ]]; RUN a
[[ a == a
  && b == b ]] && A=1; RUN "$A"
[[ $(echo a) == a ]] && A=1; RUN "$A"
[[ ${B:-a} == a ]] && A=1; RUN "$A"
if [ "$B" == "" ]; then A=1; fi; RUN $A
if [[ "$B" != "a" && -z "$C" ]]; then A=1; fi; RUN $A
if test -n "$B"; then A=1; else A=2; fi; RUN $A
if [ -n "$TP_SIZE" ]; then A=1; else A=2; fi; RUN $A
if [ $# -lt 1 ]; then A=1; else A=2; fi; RUN $A
if [ a ]; then :; fi > .out; RUN a
B=true; if $B; then A=1; else A=2; fi; RUN $A
B=false; if $B; then A=1; else A=2; fi; RUN $A
B=true; $B && A=1; RUN "$A"
B=; if $B; then A=1; else A=2; fi; RUN $A
if some-command 2> .err; then A=1; else A=2; fi; RUN $A
some-command || A=1; RUN "$A"
some-command && A=1; RUN "$A"
some-command; RUN $?
grep -q a <<< abc && A=1; RUN "$A"
grep -q x <<< abc && A=1; RUN "$A"
if echo abc | grep -q x; then A=1; else A=2; fi; RUN $A
echo abc | grep -q b || A=1; RUN "$A"
command -v some-command > .out || A=1; RUN "$A"
type some-command 2> .err || A=1; RUN "$A"
## builtins
eval A=1; RUN $A
eval "A='x y'"; RUN "$A"
eval 'A=1; B=2'; RUN $A $B
A='B=1'; eval $A; RUN $B
A='echo x'; RUN $(eval $A)
eval 'RUN a "b c"'
A="RUN a 'b c'"; eval $A
A="RUN a 'b c'"; $A
A="RUN a"; $A b
A="RUN a | tee .out"; eval "$A"
A="RUN a > .out 2>&1"; $A
A=(RUN a "b c"); "${A[@]}"
A=(RUN a "b c"); ${A[@]}
A=(RUN a "b c"); eval "${A[@]}"
A=(RUN a "b c"); "${A[@]}" d
eval "RUN \"a b\" \$A"
eval; RUN a
bash -c 'RUN a'
A=1; bash -c "RUN $A"
A=1; bash -c 'RUN "[$A]"'
export A=1; bash -c 'RUN "[$A]"'
A=1 bash -c 'RUN "[$A]"'
bash -c 'RUN "$0" "$1"' x y
bash -c 'A=1; RUN $A'; RUN "[$A]"
bash -e -c 'false; RUN a'
bash -ec 'RUN a'
sh -c 'RUN a'
srun bash -c 'RUN a'
P=(1 2); bash -c "RUN ${P[*]}"
P=(1 2); bash -c 'RUN "${P[@]}"'
exec bash -c 'RUN a'
env A=1 bash -c 'RUN "$A"'
timeout 3 bash -c 'RUN a'
timeout 3 RUN a
nohup bash -c 'RUN a'
builtin eval A=1; RUN $A
command eval A=1; RUN $A
command export A=1; RUN $A
set -e; RUN a
set -e; false; RUN a
set -e; false || true; RUN a
set -e; false && true; RUN a
set -e; if false; then :; fi; RUN a
set -e; ! true; RUN a
set -e; (false); RUN a
set -e; { false; }; RUN a
set -e; A=$(false); RUN a
set -e; local_() { local A=$(false); }; local_; RUN a
set -e; F() { false; echo x; }; F; RUN a
set -e; F() { false; A=1; }; F || true; RUN "$A"
set -e; F() { false; A=1; }; if F; then B=1; fi; RUN "$A"
set -e; [ a = b ]; RUN a
set -e; [ a = b ] && A=1; RUN a
set -e; [[ a == b ]]; RUN a
set -e; ((0)); RUN a
set -e; A=0; ((A++)); RUN a
set -e; A=0; let A++; RUN a
set -e; A=0; ((A++)) || true; RUN a
set -e; false | true; RUN a
set -eo pipefail; false | true; RUN a
set -euo pipefail; RUN a
set -e; set +e; false; RUN a
set -o errexit; false; RUN a
set -e; some-command; RUN a
set -e; for A in 1; do false; done; RUN a
set -e; case a in a) false;; esac; RUN a
set -e; while false; do :; done; RUN a
set -e; read A <<< x; RUN $A
set -e; read -d '' A <<< x; RUN "$A"
set -e; F() { [ a = b ] && A=1; }; F; RUN a
set -e; export A=$(false); RUN a
set -e; echo $(false); RUN a
set -e; RUN a; false; RUN b
set -e; shift; RUN a
set -e; trap 'RUN b' ERR; false; RUN a
set -e; trap 'RUN b' EXIT; false
set -u; RUN a
set -u; RUN "$A"
set -u; RUN "${A:-d}" "${A-}" ${A+x}
set -u; A=$B; RUN a
set -u; P=(); RUN "${P[@]}"
set -u; RUN "$@" $#
set -u; [ -z "$A" ]; RUN a
set -u; [[ -v A ]] || RUN a
set -u; (echo $A); RUN a
set -u; B=$(echo $A); RUN a
unset A; set -u; RUN $((A + 1))
set -u; P=(a); RUN "${P[1]}"
set -u; RUN ${#A}
set -u; RUN ${A[@]}
set -u; set +u; RUN "[$A]"
set -o nounset; RUN $A
set -x; RUN a
set -v; RUN a
set -n; RUN a
set -f; RUN a
set -o noglob; RUN a
set -o posix; RUN a
set -z; RUN a
set -o none; RUN a
set +o posix; RUN a
set -E; RUN a
set -h +h; RUN a
set a; RUN $1
set; RUN a
set -; RUN $#
shopt -s extglob; RUN a
shopt -s none; RUN a
shopt -q extglob; RUN $?
shopt -so errexit; false; RUN a
shopt -s inherit_errexit; set -e; A=$(false; echo x); RUN "$A"
set -e; A=$(false; echo x); RUN "$A"
shopt -s xpg_echo; RUN $(echo 'a\tb')
trap 'RUN b' EXIT; A=1
trap 'RUN b' EXIT; RUN a
trap 'RUN $A' EXIT; A=1
trap "RUN $A" EXIT; A=1
trap 'echo x' EXIT; RUN a
trap 'exit 1' INT TERM; RUN a
trap 'A=1' ERR; false; RUN "[$A]"
trap 'A=1' DEBUG; RUN "[$A]"
trap - EXIT; RUN a
trap '' INT; RUN a
trap 'RUN b' EXIT; trap - EXIT; RUN a
F() { RUN b; }; trap F EXIT; exit 0
F() { echo x; }; trap F EXIT; RUN a
(trap 'RUN b' EXIT; true)
kill -TERM $$; RUN a
trap 'RUN b' USR1; kill -USR1 $$
getopts x A; RUN $? "$A"
set -- -x 1 -y z; while getopts "x:y" A; do case $A in x) B=$OPTARG;; y) C=1;; esac; done; RUN $B $C $OPTIND
set -- -x 1 -y z; while getopts x:y A; do B+=$A; done; shift $((OPTIND - 1)); RUN $B "$@"
set -- -z; getopts x A; RUN "$A"
set -- --x 1 --y 2; while [ $# -gt 0 ]; do case $1 in --x) A=$2; shift 2;; --y) B=$2; shift 2;; esac; done; RUN $A $B
set -- --x=1 --y; for i in "$@"; do case $i in --*=*) A=${i#*=};; *) B=$i;; esac; done; RUN $A $B
set -- --x 1; while [[ $# -gt 0 ]]; do key="$1"; case $key in --x) A="$2"; shift; shift;; *) shift;; esac; done; RUN $A
set -- a --x 1; P=(); while (($#)); do case $1 in --x) A=$2; shift;; *) P+=("$1");; esac; shift; done; RUN $A "${P[@]}"
printf -v A '%03d' 7; RUN $A
printf -v A '%s,' 1 2; RUN ${A%,}
printf -v P[1] x; RUN "${P[1]}"
printf -v A x; RUN $A
echo RUN a
echo "RUN a"
: RUN a
true RUN a
printf '%s\n' RUN a
cd .; RUN a
cd none; RUN a
mkdir -p .d && cd .d; RUN a
pushd . > .out; popd > .out; RUN a
umask 022; RUN a
ulimit -n 256; RUN a
wait; RUN a
sleep 0; RUN a
hash -r; RUN a
type RUN; RUN a
enable -n echo; RUN a
source none.sh; RUN a
times; RUN a
jobs; RUN a
history; RUN a
exit 0
  RUN a
test -z "$A" && exit 0; RUN a
[ 1 = 1 ] && exit; RUN a
RUN a; exit 1; RUN b
exec; RUN a
exec some-command; RUN a
logout; RUN a
let; RUN a
unset; RUN a
export; RUN a
declare -p A 2> .err || A=1; RUN "$A"
declare -f F; RUN a
declare -z A; RUN a
caller; RUN a
compgen -v > .out; RUN a
true & RUN a; wait
RUN a & RUN_PID=$!; wait $RUN_PID
disown; RUN a
shift a; RUN b
set -- 1 2; shift $((1)); RUN "$@"
A=5 bash -c 'exit 3'; RUN $?
## failures, open values and IFS
set -e; if [ "$(hostname)" = x ]; then A=1; else shift; fi; RUN --x 1
set -e; if [ "$(hostname)" = x ]; then A=1; else false; fi; RUN --x 1
set -e; [ "$(hostname)" = x ] && shift; RUN --x 1
set -e; case $(hostname) in x) A=1;; *) ! true; shift 3;; esac; RUN --x 1
set -e; [ "$(hostname)" = x ]; RUN --x 1
set -e; [[ $(hostname) == x ]]; RUN --x 1
set -e; F() { [[ $(hostname) == x ]]; }; F; RUN --x 1
set -e; ( [[ $(hostname) == x ]] ); RUN --x 1
set -e; ((RANDOM > 40000)); RUN --x 1
set -e; let RANDOM-RANDOM*0-RANDOM*0==-1; RUN --x 1
set -e; while true; do if [ "$(hostname)" = x ]; then A=1; else false; fi; break; done; RUN --x 1
set -e; if [ "$(hostname)" = x ]; then A=1; else false; fi; RUN --x 1 || true
set -e; if [ "$(hostname)" = x ]; then RUN --a 1; else RUN --a 1; false; fi; RUN --x 1
set -e; F() { if [ "$(hostname)" = x ]; then return 0; else return 1; fi; }; F; RUN --x 1
set -e; F() { [ "$(hostname)" = x ]; return; }; F; RUN --x 1
set -e; A=$([ "$(hostname)" = x ]); RUN --x 1
set -e; [ "$(hostname)" = x ] | cat; RUN --x 1
set -eo pipefail; [ "$(hostname)" = x ] | cat; RUN --x 1
set -e; test "$(hostname)" = x && true; RUN --x 1
set -e; { [ "$(hostname)" = x ]; }; RUN --x 1
set -e; true && [ "$(hostname)" = x ]; RUN --x 1
set -e; for i in 1 2; do [ "$(hostname)" = $i ]; done; RUN --x 1
set -u; F() { shift; RUN --x $1; }; F "${BASH_REMATCH[1]}" 2
set -u; A=${#MAPFILE}; RUN --x 1
set -u; A=$REPLY; A=1; RUN --x $A
IFS=:; P=(a:b: c :d); RUN --x ${P[@]} --y ${P[*]}
IFS=:; set -- a: b; RUN --x $@
IFS=': '; P=('a b' c); RUN --x ${P[@]}
IFS=,; P=(a, b); Q=(${P[@]}); RUN --x "${Q[@]}"
IFS=,; P=(a, b); for i in ${P[@]}; do A+=[$i]; done; RUN --x "$A"
IFS=,; P=(a, b); F() { RUN --x "$@"; }; F ${P[@]#b}
set -- a b; [[ $(hostname) == x ]] && shift; RUN --x "${@:2}"
set -- a b; [[ $(hostname) == x ]] && shift; RUN --x $2
set -- a b; [[ $(hostname) == x ]] && shift; RUN --x "${@: -1}"
set -- a b; [[ $(hostname) == x ]] && shift; P=("${@:1:1}" 3); RUN --x "${P[@]}"
set -- a b; [[ $(hostname) == x ]] && shift; RUN --x ${2:-d} ${2+y}
P=(a b); [[ $(hostname) == x ]] && P=(c); RUN --x "${P[@]:1}"
A='*'; [[ $(hostname) == x ]] && A=b; RUN --x ${A:8}
A=ab; [[ $(hostname) == x ]] || A=b; RUN --x ${A#b}
A=ab; [[ $(hostname) == x ]] || A=b; RUN --x ${A/b}
A=ab; [[ $(hostname) == x ]] || A=b; B=${A#b}; RUN --x $B
A=ab; [[ $(hostname) == x ]] || A=b; B="${A#b}"; RUN --x $B --y
A=ab; [[ $(hostname) == x ]] || A=b; B=c${A%b}; RUN --x ${B#c}
A=ab; [[ $(hostname) == x ]] || unset A; RUN --z "${A+a,b}" --y ${A+c}
A=ab; [[ $(hostname) == x ]] || A=; RUN --z ${A:+a b}
A=ab; [[ $(hostname) == x ]] || unset A; RUN --z ${A-a b}
A=ab; [[ $(hostname) == x ]] || unset A; RUN --z ${A:=a b}
A=ab; [[ $(hostname) == x ]] || A=; RUN --z ${A:?}
A=ab; [[ $(hostname) == x ]] || A=; B=${#A}; RUN --z $B
A=x; B=$A~/y; B=~/x; RUN --x ${B##"$B"} --y
B=~/x; RUN --x ${B%"$B"} --y "${B#"$B"}"
B=~/x; C=$B/d; RUN --x ${C#$B/} --y ${C%/d}
A=$(date); B=$A/x; RUN --x ${B#$A} --y ${B%x} --z ${B#"$A/"}
A=$(date); RUN --x ${A#$A} --y ${A/$A}
P=("$(hostname) b"); bash <<< "RUN --x ${P[@]%[a-c]}"
A="$(hostname) b"; eval "RUN --x ${A%b}"
IFS= read -ra P <<< ""; RUN --x "${P[@]}"
IFS=, read -ra P <<< ""; RUN --x "${P[@]}"
IFS= read -ra P <<< " a b "; RUN --x "${P[@]}"
: "${U:="a\nb"}"; RUN --x "$U"
U=; RUN --x "${U:-"a\nb"}"
U=; RUN --x "${U:-$'a'}"
U=; RUN --x ${U:-$'a b'}
U=; RUN --x "${U:-"a"\$b}"
set -- 'a b' c; IFS=,; A=$(cat <<END
  $* ${P[*]}
  END
  ); RUN --x "$A"
IFS=:; for i in [ab]? a:b; do A=$i; done; RUN --x $A
IFS=:; A=a:b; [[ $(hostname) == x ]] && A=c; RUN --x $A
IFS=:; A=c; [[ $(hostname) == x ]] && A=a:b; IFS=' '; RUN --x $A
eval "B=$"1e-4""; RUN --x $B
RUN --x "$(echo $A | tr , -) b" $(echo a | tr , -)
P=("$(echo 1 | tr , -) a" 2); RUN --x "${P[@]}" ${P[0]}
set -u; A=$((DATA_PATH)); RUN --x 1
set -u; A=$((DATA_PATH * 2)); RUN --x 1 --y $A
set -e; A=$(hostname); RUN --x 1
set -e; export A=$([ "$(hostname)" = x ]); RUN --x 1
set -e; A=$(true; [ "$(hostname)" = x ] && true); RUN --x 1
A=$(date); RUN --x ${A//$A/y} --y "${A/"$A"/z w}" --z ${A/#$A/k} ${A/%$A}
A=ab; [[ $(hostname) == x ]] || A=b; F() { RUN --x "$1" $#; }; F "${A#b}" 2
A=ab; [[ $(hostname) == x ]] || A=b; RUN --x "${A#b}" --y
set -ex; [ "$(hostname)" = x ] && A=1; RUN --x 1
set -e; if [ "$(hostname)" = x ]; then A=1; fi; RUN --x 1
set -e; [ -d /none ] || false; RUN --x 1
set -e; for i in $(seq $(hostname)); do false; done; RUN --x 1
set -e; while [ "$(hostname)" = x ]; do false; done; RUN --x 1
set -e; while [ "$(hostname)" = Qqrstu ]; do false; done; RUN --x 1
set -e; trap 'RUN --y 2' EXIT; if [ "$(hostname)" = x ]; then A=1; else false; fi; RUN --x 1
set -e; F() { if [ "$(hostname)" = x ]; then A=1; else false; fi; }; F; F || true; RUN --x 1
set -e; A=1; F() { A=2; [ "$(hostname)" = x ] && return 1; A=3; }; F; RUN --x $A
set -e; F() { return 1; }; if [ "$(hostname)" = x ]; then :; else F; fi; RUN --x 1
set -e; bash -ec 'if [ "$(hostname)" = x ]; then :; else false; fi; RUN --y 2' ; RUN --x 1
set -u; if [ "$(hostname)" = x ]; then :; else echo $NOT_SET_Z; fi; NOT_SET_Z=1; RUN --x 1
if [ "$(hostname)" = x ]; then set -e; fi; false; RUN --x 1
set -e; ! [ "$(hostname)" = x ]; ! true; RUN --x 1
set -e; trap 'B='a b'' EXIT; RUN --x 1
trap 'B=1' NONE; A=$?; RUN --x $A
trap 'exit 1' INT TERM SIGHUP 15 USR1 EXIT; RUN --x 1
A=\$A; A+=$(hostname); eval "RUN --x $A --y"
A=/; eval "RUN --x \$A/$(hostname)"
eval "RUN --x \${A}$(hostname) \$B-$(hostname)"
C=; F() { RUN --x $2; }; F ${C:0:-1} 8
P=(a b); F() { RUN --x 1; }; F ${P[@]:0:-1} 8
set -- $(seq -w 8 10) c; RUN --x $2
set -- $(seq -w 8 10) c; RUN --x $#
set -- $(seq -w 8 10) c; RUN --x ${@:2:1}
set -- $(seq -w 8 10) c; shift; RUN --x $1
P=($(seq -w 8 10) c); RUN --x ${P[1]}
P=($(seq -w 8 10) c); RUN --x ${P[-1]}
P=(c $(seq -w 8 10)); RUN --x ${#P[@]} ${P[0]}
F() { RUN --x $2; }; F $(seq -w 8 10) c
P=("$(seq -w 8 10)" c); RUN --x ${P[1]}
set -e; F() { echo a | grep -q -1 && unset A; }; F; RUN --x 1
set -e; F() { [ "$(hostname)" = x ] && A=1; }; F; RUN --x 1
set -e; F() { [ "$(hostname)" = x ] && A=1; return; }; F; RUN --x 1
set -e; ( [ "$(hostname)" = x ] && A=1 ); RUN --x 1
set -e; { [ "$(hostname)" = x ] && A=1; }; RUN --x 1
set -e; F() { if true; then [ "$(hostname)" = x ] && A=1; fi; }; F; RUN --x 1
set -e; F() { for i in 1; do [ "$(hostname)" = x ] && A=1; done; }; F; RUN --x 1
set -e; G() { [ "$(hostname)" = x ] && A=1; }; F() { G; }; F; RUN --x 1
false; RUN --x $? $(echo 1) $?
false; RUN --x "$(exit 3)" $? `echo 1`$?
false; A=$(echo 1) B=$?; RUN --x $B $?
false; A=$? B=$(exit 2)$?; RUN --x $A $B $?
F() { A=$(exit 4); return; }; F; RUN --x $?
## shapes of real scripts
GPUS_PER_NODE=8; NNODES=${NNODES:-2}; WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES)); RUN --w $WORLD_SIZE
GPT_ARGS="
  --x 1 \
  --y 2
  "
  RUN $GPT_ARGS
GPT_ARGS="
  --x 1
  --y 2
  --z 3
  "
  RUN \
  $GPT_ARGS \
  --d 4 \
MODEL_ARGS=(--x 1 --y 2); TRAIN_ARGS=(--lr 1.0e-4); RUN ${MODEL_ARGS[@]} ${TRAIN_ARGS[@]}
MODEL_ARGS=(
    --num-layers 32 
    --hidden-size 4096
    # --old 1
    --norm RMSNorm
  )
  RUN "${MODEL_ARGS[@]}"
if [ "${USE_X:-true}" = true ]; then X_ARGS="--use-x"; else X_ARGS=""; fi; RUN $X_ARGS --y
if [[ $PR == fp8 ]]; then A="--fp8"; elif [[ ${PR:-bf16} == bf16 ]]; then A="--bf16"; fi; RUN $A
[ -n "$EXTRA" ] && A="--x $EXTRA" || A="--none"; RUN $A
MODEL=7B; if [ $MODEL = 7B ]; then L=32; H=4096; elif [ $MODEL = 70B ]; then L=80; H=8192; fi; RUN --l $L --h $H
MODEL=${1:-7B}; case $MODEL in 7B) L=32;; 70B) L=80;; *) echo "unknown $MODEL"; exit 1;; esac; RUN --l $L
SCRIPT_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd); RUN --dir $SCRIPT_DIR/data
CURRENT_TIME=$(date "+%Y.%m.%d-%H.%M.%S"); RUN --name run-$CURRENT_TIME --x 1
export CUDA_DEVICE_MAX_CONNECTIONS=1; RUN a
DISTRIBUTED_ARGS="--nproc_per_node 8"; RUN $DISTRIBUTED_ARGS
TP=2 PP=4; DP=$((32/(TP*PP))); RUN --tp $TP --pp $PP --dp $DP
GBS=$((MBS*8)); RUN --g $GBS
MBS=2; GBS=$((MBS * 8)); TOKENS=$((GBS * 4096)); ITERS=$((1000000 / TOKENS)); RUN $GBS $TOKENS $ITERS
LR=1e-4; MIN_LR=1e-5; RUN --lr ${LR} --min-lr ${MIN_LR}
do_valid=true; if $do_valid; then A="--valid"; fi; RUN $A
options=" --x 1 \
          --y 2 \
          --z '3 4'"
  RUN ${options}
run_cmd="RUN --x 1 ${A} 2>&1 | tee log_${RUN_ID}.txt"
  echo ${run_cmd}
  eval ${run_cmd}
run_cmd="RUN
   --x 1 --y"
  eval $run_cmd
set -o pipefail; RUN --x 1 2>&1 | tee .log_${RUN_ID}
CMD="RUN --x 1"; echo "$CMD"; $CMD
for LR in 1e-4 3e-4; do for BS in 1 2; do RUN --lr $LR --bs $BS; done; done
RUN --data-path 0.5 a 0.5 b --split 99,1,0
RUN --x "${A:-$((2 * 4))}" --y ${B:-"a b"} --z="${C:-d}"
A=${A:-"--x 1 --y 2"}; RUN $A
A=${A:-'x'}; B="${B:-'y'}"; RUN $A "$B"
[[ -z "${A}" ]] && A=5; RUN $A
[ -z ${A} ] && A=5; RUN $A
[ -z ${A+x} ] && A=5; RUN $A
: ${TP:=2} ${PP:=$((TP * 2))}; RUN $TP $PP
while [[ $# -gt 0 ]]; do shift; done; RUN $#
VAR=TP_SIZE_X; TP_SIZE_X=4; RUN --tp ${!VAR}
AC=sel; L=4; if [ $AC = full ]; then A=" --full"; elif [ $AC = sel ]; then A=" --sel --l ${L}"; elif [ $AC = none ]; then A=""; fi; RUN ${A}
A=(--x 1); A+=(--y 2); [ 1 -gt 2 ] && A+=(--z 3); RUN "${A[@]}"
A=(--x 1); if ((${#A[@]} > 0)); then A+=("--n=${#A[@]}"); fi; RUN "${A[@]}"
readonly TP=2; readonly ARGS="--tp $TP"; RUN $ARGS
main() { local tp=${1:-2}; shift; RUN --tp "$tp" "$@"; }; main 4 --x "y z"
die() { echo "$*" >&2; exit 1; }; [ 1 -eq 1 ] || die no; RUN a
die() { echo "$*" >&2; exit 1; }; [ 1 -eq 2 ] || die no; RUN a
log() { echo "[$(date)] $*"; }; log start; RUN a
trap 'log end' EXIT; RUN a
join() { local IFS=$1; shift; echo "$*"; }; RUN --x "$(join , a b c)"
IFS=',' read -ra GPUS <<< "0,1,2,3"; RUN --n ${#GPUS[@]}
GPUS="0,1,2,3"; GPUS=(${GPUS//,/ }); RUN --n ${#GPUS[@]}
GPUS="0,1,2,3"; N=$(echo $GPUS | tr ',' '\n' | wc -l); RUN --n $N
SEQ=4096; SEQ_K=$((SEQ / 1024))k; NAME="m-${SEQ_K}-tp${TP:-1}"; RUN --name $NAME
SIZE=7b; SIZE=${SIZE^^}; L=L_$SIZE; L_7B=32; RUN --l ${!L}
PATHS=""; for i in 1 2 3; do PATHS="$PATHS 1.0 data_$i"; done; RUN --data $PATHS
PATHS=$(printf "1.0 data_%d " 1 2); RUN --data $PATHS
DATA=(d1 d2); RUN --data "${DATA[@]/%/_text_document}"
[ $((8 % 3)) -ne 0 ] && { echo bad; exit 1; }; RUN a
if (( 8 % 4 != 0 )); then exit 1; fi; RUN a
ulimit -c 0 2> .err; mkdir -p .ckpt/x; RUN --save .ckpt/x
declare -A L=([7b]=32 [70b]=80); M=70b; RUN --l ${L[$M]}
A=true; [[ $A == true ]] && X="--x" ; [[ $A == false ]] && Y="--y"; RUN $X $Y
A=1; (( A == 1 )) && X=--x || X=--y; RUN $X
A="$(cat <<-END
      --x 1
      --y 2
  END
  )"
  RUN $A
python -c 'print(1)' && RUN a
N=$(python -c 'print(8)'); RUN --n $N
N=${SLURM_NNODES_X:-$(echo 1)}; RUN --n $N
pip --version > .out 2>&1 || true; RUN a
export PYTHONPATH=$PYTHONPATH:./x; RUN a
unset NCCL_DEBUG; RUN a
A='--x'; A="$A 1"; A="${A} --y"; A+=" 2"; RUN $A
if [ -z "$A" ]
  then
    A=1
  fi
  RUN $A
RUN --x 1 \
  --y 2 \
  \
  --z 3
RUN --x 1 \
  ${A} \
  # --y 2 \
  --z 3
RUN --x 1 \ 
  --y 2
