# Runs in the guest: two interfaces joined to a link, in the one namespace that soft-RoCE works in.
set -e
mtu=9000 first=10.92.0.1 second=10.92.0.2
# The shell's own ip knows no veth.
ip() { /bin/ip "$@"; }
ip link add veth1 type veth peer name veth2
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
for device in veth1 veth2; do
    echo 1 >/proc/sys/net/ipv6/conf/$device/disable_ipv6
    # What comes from the other end comes from an address of this machine.
    echo 1 >/proc/sys/net/ipv4/conf/$device/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/$device/rp_filter
    ip link set $device mtu $mtu up
done
ip address add $first/32 dev veth1
ip address add $second/32 dev veth2
ip route add $second dev veth1 table 101
ip route add $first dev veth2 table 102
# Otherwise "local" comes before all others, and never lets a packet out.
ip rule add preference 1 iif veth1 lookup local
ip rule add preference 2 iif veth2 lookup local
ip rule add preference 3 from $first to $second lookup 101
ip rule add preference 4 from $second to $first lookup 102
ip rule add preference 5 lookup local
ip rule delete preference 0
