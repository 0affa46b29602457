# Grammar of random launch scripts (tests/oracles/bash_scripts.py reads it).
# `## ` begins a symbol, whose forms are one per line, with `WEIGHT | ` before it where that is not one.
# <symbol> stands for a random form of it, <nl> for a new line, %i and %j for new names.
# RUN is the launch. NAME of `set NAME` is set at the start of a script that uses it.
## script
8 | <options><statements><launch>
<launch>
<options><statements>(<nl><launch><nl>)
<options><statements>F() {<nl><launch><nl>}<nl>F <word> "<text>"
<options>F() {<nl><statements>}<nl>F <word> <word><nl><launch>
<options>main() {<nl>local A=<value> T<nl><statements><launch><nl>}<nl>main <word> "$A"
<options><statements>if <condition>; then<nl><launch><nl>else<nl><launch><nl>fi
<options>for %i in <words>; do<nl><statements><torchrun> --i $%i<nl>done
<options>trap '<torchrun> --x $A "$B"' EXIT<nl><statements>
<options><statements>CMD="<torchrun> --x $A --y ${P[*]}"<nl>eval $CMD
<options><statements>CMD="<torchrun> --x $A --y ${P[*]}"<nl>$CMD
<options><statements>CMD=(<torchrun><arguments>)<nl>"${CMD[@]}"
## torchrun
RUN
## options
14 | 
set -e<nl>
set -u<nl>
set -eu<nl>
set -euo pipefail<nl>
set -ex<nl>
set -o errexit -o nounset<nl>
set -f<nl>
set +B<nl>
shopt -s extglob<nl>
shopt -s nullglob<nl>
shopt -s nocasematch<nl>
shopt -s lastpipe<nl>
set -- <words><nl>
IFS=,<nl>
IFS=<nl>
IFS=$'\n'<nl>
IFS=:<nl>
## statements
3 | <statement><nl>
3 | <statement><nl><statement><nl>
2 | <statement><nl><statement><nl><statement><nl>
<statement><nl><statement><nl><statement><nl><statement><nl><statement><nl>
## statement
9 | <name>=<value>
3 | <name>+=<value>
4 | <array>=(<words>)
3 | <array>+=(<words>)
2 | <array>[<index>]=<value>
<array>[<index>]+=<value>
<array>=([<number>]=<value> <value> [<number>]=<value>)
<array>=(<nl><word> # a comment<nl><word><nl>)
<array>=($(<output>))
<array>=()
M[<key>]=<value>
M=([<key>]=<value>)
M+=([<key>]=<value>)
<declaration>
4 | if <condition>; then<nl><statements>fi
3 | if <condition>; then<nl><statements>else<nl><statements>fi
if <open>; then<nl><statements>fi
if <open>; then<nl><statements>else<nl><statements>fi
<open> && <simple>
if <open> || <test>; then <simple>; fi
if <condition>; then<nl><statements>elif <condition>; then<nl><statements>else<nl><statements>fi
2 | <test> && <simple>
2 | <test> || <simple>
<test> && <simple> || <simple>
<test> && { <simple>; <simple>; }
! <test> && <simple>
case <subject> in<nl><pattern>) <simple>;;<nl><pattern> | <pattern>)<nl><simple><nl>;;<nl>*) <simple>;;<nl>esac
case <subject> in (<pattern>) <simple>;& <pattern>) <simple>;; *) <simple>; esac
case <subject> in <pattern>) <simple>;;& *) <simple>;; esac
3 | for %i in <words>; do<nl><name>+=<value>$%i<nl>done
for %i in <words>; do<nl><array>+=(--n "$%i")<nl>done
for %i in "${<array>[@]}"; do<nl><statements>done
for %i in "${!<array>[@]}"; do<nl><name>+=$%i${<array>[%i]}<nl>done
for %i in {1..3}; do<nl><name>+=$%i<nl>done
for %i in $(seq <number>); do<nl><name>+=$%i<nl>done
for %i in 1 2 3; do<nl><test> && break<nl><name>=$%i<nl>done
for %i in 1 2 3; do<nl>[ $%i = 2 ] && continue<nl><name>+=$%i<nl>done
for %i in 1 2; do<nl>for %j in a b; do<nl>[ $%j = b ] && <leave> 2<nl><name>+=$%i$%j<nl>done<nl>done
for %i; do<nl><name>+=$%i<nl>done
for ((%i = 0; %i < <number>; %i++)); do<nl><name>+=$%i<nl>done
for ((%i = <number>, J = 1; %i > 0; %i -= 2)); do<nl><name>+=$((%i * J))<nl>done
%i=0<nl>while [ $%i -lt 3 ]; do<nl>%i=$((%i + 1))<nl><statements>done
%i=0<nl>while (( %i++ < 3 )); do<nl><simple><nl>done
%i=3<nl>until ((%i-- == 0)); do<nl><simple><nl>done
while [[ $# -gt 0 ]]; do<nl>case $1 in<nl>--x) <name>=$2; shift 2;;<nl>*) <array>+=("$1"); shift;;<nl>esac<nl>done
while getopts "x:y" %i; do<nl>case $%i in x) <name>=$OPTARG;; y) <name>=y;; esac<nl>done
while read -r %i; do<nl><name>+=$%i<nl>done <<< "<text>"
while IFS=<separator> read -r %i %j; do<nl><name>+="$%i-$%j"<nl>done <<EOF<nl><text><nl><text><nl>EOF
echo "<text>" | while read %i; do<nl><name>+=$%i<nl>done
2 | F() {<nl><body>}<nl>F <words>
F() {<nl><body>}<nl><name>=$(F <words>)
F() {<nl><body>}<nl>if F <words>; then <simple>; else <simple>; fi
function G { <simple>; return <number>; }<nl>G <words> && <simple><nl><name>=$?
( <simple>; <simple> )
{ <simple>; <simple>; }
<test>; <name>=$?
read -r <name> <<< "<text>"
read -r <name> %i <<< "<text>"
IFS=<separator> read -r <name> %i <<< <value>
IFS=<separator> read -ra <array> <<< "<text>"
IFS=<separator> read -r -a <array> <<< "$<name>"
read -r <name> <<EOF<nl><text><nl>EOF
read -d '' <name> <<'EOF'<nl><text><nl>EOF
mapfile -t <array> <<< "<text>"
mapfile -t <array> <<EOF<nl><text><nl><text><nl>EOF
mapfile -t <array> < <(<output>)
readarray -t <array> <<< "$(<output>)"
printf -v <name> '<format>' <value>
2 | <name>=$(cat <<EOF<nl><text><nl>EOF<nl>)
let "<assigned>"
2 | ((<assigned>))
<name>=$((<arithmetic>))
set -- <words>
set -- "$@" <word>
shift
shift <number>
unset <name>
unset <array>[<number>]
unset '<array>[-1]'
unset <array>
local_only() { local <name>=<value>; <simple>; }<nl>local_only
eval "<name>=<value>"
eval <name>='"<text>"'
eval "<name>=\$<name>"
trap '<simple>' EXIT
trap '<simple>' ERR
shopt -s <shopt>
shopt -u <shopt>
set -<letter>
set +<letter>
set -o pipefail
set -e<nl><test>
IFS=<separator>
IFS=<separator> <name>=<value>
unset IFS
: ${<name>:=<value>}
: "${U:=<value>}"
echo "<text>" > .out.log
echo "<text>" >> .out.log 2>&1
mkdir -p .logs && <simple>
cd . && <simple>
echo "<text>" | grep -q <plain> && <simple>
grep -q <plain> <<< "<text>" || <simple>
true | false && <simple>
if true | false; then <simple>; fi
<simple> & wait
exec 2>&1
exec > .out.log
export PATH
<name>=<value> <other>=<value>
<name>=<value> true
<name>=<value> F2=x eval '<other>=$<name>'
<name>=${<name>}; <other>=$<name>
select %i in <words>; do <name>=$%i; break; done
coproc cat
[[ <pattern> ]] && <simple>
# a comment with "quotes and $(
time <simple>
## leave
break
continue
## simple
6 | <name>=<value>
2 | <name>+=<value>
2 | <array>+=(<words>)
<array>[<index>]=<value>
((I++))
<name>=$((I + <number>))
export E=<value>
:
echo "<text>"
shift
unset <name>
set -- <words>
## body
2 | local <name>=$1<nl><statements>
local <name> %i=<value><nl><simple><nl><other>=$<name>-$#<nl>
local -a <array>=(<words>)<nl><simple><nl>
<name>="$1-${2:-<plain>}"<nl>
<array>+=("$@")<nl>
for %i in "$@"; do<nl><name>+=$%i<nl>done<nl>
[ -z "$1" ] && return <number><nl><simple><nl>
<simple><nl>return<nl><simple><nl>
shift<nl><name>=$1<nl>echo "$@"<nl>
echo <words><nl>
<test><nl>
declare -g <name>=<value><nl>
local -n %i=<name><nl>%i=<value><nl>
local IFS=<separator><nl><name>="$*"<nl>
while (( $# )); do<nl><name>+=$1; shift<nl>done<nl>
## declaration
2 | export E=<value>
export <name>
export <name>=<value> E=<value>
declare <name>=<value>
declare -a <array>=(<words>)
declare -i I=<arithmetic>
declare -i I; I=<number>+<number>; I+=1
declare -l <name>=<value>
declare -u <name>; <name>=<value>
declare -r K=<value>
readonly K=<value>; K=<value>
readonly -a KS=(<words>)
declare -x E=<value>
declare -A M=([<key>]=<value> [<key>]=<value>)
declare -A M; M[<key>]=<value>
declare -A M=(<key> <value> <key> <value>)
declare -n %i=<name>; %i=<value>
declare -n %i=<array>; %i+=(<words>)
typeset <name>=<value>
declare +i I; I=<number>+<number>
declare "<name>=<value>"
declare <array>=<value>
unset -v <name>
## name
3 | A
3 | B
C
## other
D
B
## array
3 | P
Q
## key
a
b
x y
"c d"
$A
1
## index
0
1
2
-1
5
I
$I
I+1
<number>
## number
1
2
3
4
8
## letter
e
u
f
x
a
## shopt
extglob
nullglob
nocasematch
nocaseglob
failglob
lastpipe
expand_aliases
globstar
## separator
,
:
' '
', '
$'\n'
''
/
-
=
## plain
8
bf16
a
b.c
x-y
llama-8b
a,b
a:b:
.data/x.bin
--tp
--use-x
007
1e-4
-1
A_b
Hello
1,2,,3
3 | <number>
## text
3 | <plain>
3 | <plain> <plain>
<plain>  <plain>
2 | <parameter> <plain>
--a <plain> --b <parameter>
<plain>,<plain>
<plain>:<plain> <plain>

  <plain>
 <plain>
it's
a\"b
\$A
\\<plain>
a\nb
*
$(<output>)
`echo <plain>`
$((<arithmetic>))
[a-c]*
{a,b}
~
#<plain>
a\<nl>b
## first
5 | <plain>
"<plain> <plain>"
"<plain>,<plain>"
''
'  a  b '
'--a 1 --b 2'
'*'
3
## value
6 | <plain>
5 | "<text>"
2 | '<plain> <plain>'
'$A "x" \n'
''
$'a\tb\n'
$'it\'s \x41\101 \u00e9'
$"<plain>"
<plain>\ <plain>
\$A
\\<plain>
4 | <parameter>
2 | "<parameter>"
$((<arithmetic>))
2 | $(<output>)
"$(<output>)"
`<output>`
<plain>"<text>"'<plain>'
<runtime>
"<runtime> <plain>"
~/<plain>
$[<arithmetic>]
## runtime
$RUN_ID
${DATA_PATH}
${DATA_PATH%/}
$(date +%s)
$(hostname)
`whoami`
$(echo $A | tr , -)
$MASTER_ADDR:6000
## word
9 | <value>
2 | $<name>
2 | "${<array>[@]}"
${<array>[@]}
"${<array>[*]}"
"x${<array>[@]}y"
"$@"
$*
"$*"
{<plain>,<plain>}
x{<plain>,$A}y
{1..3}
{01..03}
{3..1}
{a..e..2}
{a,{b,c}}
{<plain>}
{1..$I}
"{a,b}"
*.bin
data/[ab]?
$A<value>
--x={1,2}
<plain>{,.bak}
## words
2 | <word>
3 | <word> <word>
2 | <word> <word> <word>
## parameter
8 | $<name>
5 | ${<name>}
3 | ${<name>:-<default>}
${<name>-<default>}
2 | ${U:-<default>}
${U-<default>}
${TP_SIZE:-<default>}
${U:+<default>}
2 | ${<name>:+<default>}
${<name>+<default>}
${U:=<default>}
${U=<default>}
${<name>:?<plain>}
${<name>?}
2 | ${#<name>}
${<name>:<number>}
${<name>:1:<number>}
${<name>: -<number>}
${<name>:0:-1}
${<name>: -2:1}
${<name>:I}
${<name>#<pattern>}
${<name>##<pattern>}
${<name>%<pattern>}
${<name>%%<pattern>}
${<name>##*/}
${<name>%.*}
${<name>/<pattern>/<replacement>}
${<name>//<pattern>/<replacement>}
${<name>/#<pattern>/<replacement>}
${<name>/%<pattern>/<replacement>}
${<name>//<pattern>}
${<name>^}
${<name>^^}
${<name>,}
${<name>,,}
${<name>^^[a-c]}
${<name>~~}
${<name>@<transformation>}
${!N}
${!N:-<default>}
${!N@}
${!<array>[@]}
${!M[@]}
$<array>
2 | ${<array>[<index>]}
2 | ${<array>[@]}
${<array>[*]}
2 | ${#<array>[@]}
${#<array>[0]}
${#<array>}
${<array>[@]:<number>}
${<array>[@]:0:<number>}
${<array>[@]: -1}
${<array>[@]/#/--}
${<array>[@]/<pattern>/<replacement>}
${<array>[@]%<pattern>}
${<array>[@]^^}
${<array>[@]:-<default>}
${<array>[@]:+<default>}
${<array>[*]/#/--}
${<array>[@]@Q}
2 | ${M[<key>]}
${M[@]}
${#M[@]}
$1
${2}
${1:-<default>}
${3:-}
$#
$@
$*
${@:2}
${@:1:1}
${*:2}
${#@}
${!#}
$?
$-
$_
${PIPESTATUS[0]}
${BASH_REMATCH[1]}
$E
${K:-k}
${FUNCNAME[0]}
${PWD:+p}
$OPTIND
## transformation
Q
U
u
L
E
P
A
a
## default
4 | <plain>

"<text>"
'<plain> x'
<plain> <plain>
$B
${B:-<plain>}
$(<output>)
\$x
"$B"
## pattern
4 | <plain>
*
a*
*-*
*<plain>
<plain>*
?
[a-c]
[!a]
[^a]*
[[:digit:]]
[[:upper:]]*
*[0-9]
"*"
'a'*
\*
*.*
$B
"$B"
*"$B"*
@(a|b)*
+([0-9])
!(a)
?(x)*
## replacement
3 | <plain>

_
$B
"<plain>"
&
\/
'x y'
## arithmetic
4 | <number>
3 | I
I + <number>
<number> * <number>
<arithmetic> - <arithmetic>
(<arithmetic>) * 2
<number> / 2 % 2
7 / -2
-7 % 3
2 ** <number>
2 ** 3 ** 1
I << 2 | 1
I & 3 ^ 5
~I
!I
I > 2 ? 10 : 20
I == 3 && J != 2 || 0
<number> <= I
I++ + ++J
I--, J + 1
I = <number>
I += 2
$I * $J
${I}0
0x1F
010
16#ff
2#101
36#z
P[1]
P[I]
${#P[@]}
${P[0]:-0}
N
X
1 / 0
$(echo 4) + 1
"<number>"
08
## assigned
I=<number>
I += <number>
I++
--J
I = J * 2, J = 5
P[0]=<number>
I <<= 2
I=I>3?1:0
J=1 / 2
## open
[[ $<name> > <plain> ]]
[[ $<name> < <plain> ]]
[ "$<name>" \< "<plain>" ]
grep -q x <<< "<text>"
command -v torchrun > .out.log
[ -f none.txt ]
[ -d . ]
[ -z "$TP_SIZE" ]
[ "$(hostname)" = x ]
## condition
5 | <test>
<test> && <test>
<test> || <test>
! <test>
{ <test>; }
( <test> )
true
false
! false
F0=1
<name>=<value>
[ <number> -eq $I ] && [ -n "<text>" ]
## test
2 | [ "$<name>" = <plain> ]
[ "$<name>" != "<text>" ]
[ "$<name>" == <value> ]
[ $<name> = <plain> ]
[ -z "$<name>" ]
[ -n "$<name>" ]
[ -n $<name> ]
[ "$<name>" ]
[ $I -lt <number> ]
[ "$I" -ge <number> ]
[ $<name> -gt <number> ]
[ -z "$<name>" -o $I -eq 3 ]
[ "$<name>" = a -a $I -eq 3 ]
[ ! "$<name>" = <plain> ]
[ \( "$<name>" = a \) ]
[ -v <name> ]
[ ${#<array>[@]} -gt 1 ]
test "$<name>" = <value>
test -n "$<name>"
2 | [[ $<name> == <pattern> ]]
[[ $<name> != <pattern> ]]
[[ $<name> = "<text>" ]]
[[ "$<name>" =~ <regex> ]]
[[ -z $<name> ]]
[[ -n $<name> && $I -gt 2 ]]
[[ $<name> == a || ! $I -lt 2 ]]
[[ ( $<name> == a ) && -n x ]]
[[ $I -eq 1+2 ]]
[[ $<name> -eq <number> ]]
[[ -v <name> ]]
[[ -v U ]]
[[ $<name> ]]
[[ -o errexit ]]
[[ ${<array>[0]} == <pattern> ]]
[[ " ${<array>[*]} " == *" <plain> "* ]]
[[ " ${<array>[*]} " =~ " <plain> " ]]
(( I > <number> ))
(( <arithmetic> ))
(( ${#<array>[@]} ))
true
false
## regex
^[0-9]+$
^a
b$
a.c
^(a|b)
([0-9]+)b
^[[:alpha:]]+$
\.bin$
"a."
$B
^$
[^,]+,(.*)
-
^--
x?-y{1,2}
\d
## subject
$<name>
"$<name>"
"${<name>,,}"
<plain>
$I
"$1"
## output
3 | echo <plain>
2 | echo <words>
echo "<text>"
echo -n <plain>
echo -e 'a\tb'
printf '%s\n' <words>
printf '<format>' <value>
printf "%s " "${<array>[@]}"
2 | seq <number>
seq 0 2 4
seq -s , <number>
seq -w 8 10
echo $((<arithmetic>))
echo $<name>; echo <plain>
cat <<< "<text>"
echo <plain> | cat
:
basename data/x.bin .bin
dirname data/x.bin
IFS=,; echo "${<array>[*]}"
echo "${<array>[@]}" | wc -w
## format
%s
%d
%03d
%5.2f
%x
%s-%s
%q
%b
%-6s|
%%
%s\n
%s,
## launch
12 | <torchrun><arguments>
env X=1 <torchrun><arguments>
X=$A <torchrun><arguments>
exec <torchrun><arguments>
time <torchrun><arguments>
nohup <torchrun><arguments> &<nl>wait
<torchrun><arguments> 2>&1 | tee .out.log
<torchrun><arguments> > .out.log 2>&1
<torchrun><arguments> || exit 1
<torchrun><arguments> &<nl>wait
srun bash -c "<torchrun><quoted>"
bash -c '<torchrun><quoted>'
bash <<EOF<nl><torchrun><arguments><nl>EOF
if <condition>; then<nl><torchrun><arguments><nl>fi
<test> && <torchrun><arguments>
command <torchrun><arguments>
<torchrun><arguments> \<nl>  <argument> \<nl>  <argument>
<torchrun><arguments>; <simple>
<torchrun><arguments><nl><torchrun><arguments>
## quoted
 --x $A
 --x \$A ${P[*]}
 --x $((I + 1)) --y '$A'
## arguments
2 | <argument>
4 | <argument><argument>
4 | <argument><argument><argument>
2 | <argument><argument><argument><argument><argument>
## argument
4 |  --x <word>
2 |  --y=<word>
3 |  <word>
4 |  --z "<parameter>"
4 |  --z <parameter>
2 |  "${<array>[@]}"
2 |  ${<array>[@]}
 --s=$<name>
 $((<arithmetic>))
 --w "<text>"
 \<nl>  --c <word>
 --n '<plain> <plain>'
 "$A"'<plain>'$B
## set A
A=<first>
## set B
B=<first>
## set C
C=<first>
## set D
D=<first>
## set E
E=<first>
## set I
I=3
## set J
J=<number>
## set N
N=A
## set X
X='I + 1'
## set T
T=1
## set P
P=(<first> <first> <first>)
## set Q
Q=(<first> "<plain>")
## set M
declare -A M=([a]=<first>)
## set U
U=1<nl>unset U
