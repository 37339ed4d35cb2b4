#!/bin/busybox sh
# The guest's first process: kernel modules, network, soft-RoCE on the network device, the agent.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root LC_ALL=C
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm /run /tmp /root /host
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
ln -s /proc/self/fd /dev/fd
while read -r module; do
    insmod "/modules/$module" || echo "guest: insmod $module failed"
done </modules/order
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=none host /host || poweroff -f
# MTU and ADDRESS.
. /host/configuration
hostname guest
ulimit -l unlimited
ip link set lo up
for path in /sys/class/net/*; do
    name=${path##*/}
    [ "$name" = lo ] || device=$name
done
echo 0 >"/proc/sys/net/ipv6/conf/$device/accept_dad"
ip link set "$device" mtu "$MTU" up
ip addr add "$ADDRESS" dev "$device"
rdma link add rxe0 type rxe netdev "$device"
port=/sys/class/infiniband/rxe0/ports/1
tries=0
until grep -q ACTIVE $port/state || [ $tries -ge 100 ]; do
    usleep 20000
    tries=$((tries + 1))
done
# The GID that is the IPv4 address.
for index in 0 1 2 3 4 5 6 7; do
    case $(cat $port/gids/$index) in
        0000:0000:0000:0000:0000:ffff:*)
            export RXE_GID_INDEX=$index
            break
            ;;
    esac
done
cd /host && sh agent.sh
sync
poweroff -f
