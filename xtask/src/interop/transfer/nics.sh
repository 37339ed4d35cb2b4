# Runs in the guest: eight soft-RoCE devices, each on an interface with an address of its own, joined by
# a bridge as by a switch. All are in the one namespace that soft-RoCE works in.
#
# What goes from one to another leaves through the first's interface: soft-RoCE asks for the route of
# that interface, and the local table has none there.
[ ! -e /sys/class/infiniband/rxe1 ] || exit 0
set -e
# The shell's own ip knows neither veth nor bridge.
ip() { /bin/ip "$@"; }
settings=/proc/sys/net/ipv4/conf
echo 0 >$settings/all/rp_filter
# All eight links share one queue of the kernel, which holds 1000 packets: less than what engines have under way to one
# another. What it drops looks like a loss of the link.
echo 100000 >/proc/sys/net/core/netdev_max_backlog
ip link add switch type bridge
ip link set switch mtu 9000 up
for number in 1 2 3 4 5 6 7 8; do
    nic=nic$number port=port$number
    ip link add $nic type veth peer name $port
    for interface in $nic $port; do
        echo 1 >/proc/sys/net/ipv6/conf/$interface/disable_ipv6
        ip link set $interface mtu 9000 up
    done
    ip link set $port master switch
    # What comes from another one comes from an address of this machine.
    echo 1 >$settings/$nic/accept_local
    echo 0 >$settings/$nic/rp_filter
    # Otherwise each answers for the addresses of all.
    echo 1 >$settings/$nic/arp_ignore
    ip address add 10.93.0.$number/24 dev $nic
    rdma link add rxe$number type rxe netdev $nic
done
for number in 1 2 3 4 5 6 7 8; do
    until grep -q ACTIVE /sys/class/infiniband/rxe$number/ports/1/state; do usleep 20000; done
done
# Each knows where the others are. The first queue pair that had to ask took a second here, which is
# ib_core's timeout: presumably the answer comes over veth before that listens for it.
for from in 1 2 3 4 5 6 7 8; do
    for to in 1 2 3 4 5 6 7 8; do
        [ $from = $to ] ||
            echo "neighbour add 10.93.0.$to lladdr $(cat /sys/class/net/nic$to/address) dev nic$from nud permanent"
    done
done | ip -batch -
