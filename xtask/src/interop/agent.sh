# Runs in the guest: takes commands from the shared folder one after the other.
#
# N.cmd appears (by rename): it is run, its output goes to N.out and its exit status to N.status.
# N.listening appears when a TCP socket listens on the port of the pingpong's handshake.
# N.stop asks to end the command, which may hang: N.state says where the guest is then. quit asks to
# end the guest.
cd /host || exit 1
: >up
n=0
while :; do
    n=$((n + 1))
    until [ -e $n.cmd ]; do
        [ ! -e quit ] || exit 0
        usleep 20000
    done
    (
        sh $n.cmd >$n.out 2>&1
        echo $? >$n.status.new
        mv $n.status.new $n.status
    ) &
    until [ -e $n.status ]; do
        if [ ! -e $n.listening ] && grep -q ':4853 .* 0A ' /proc/net/tcp /proc/net/tcp6; then
            : >$n.listening
        fi
        if [ -e $n.stop ]; then
            [ -e $n.state ] || sh state.sh >$n.state 2>&1
            kill $(cat /tmp/$n.pid) 2>/dev/null
        fi
        usleep 50000
    done
done
