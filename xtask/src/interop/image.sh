# Builds the guest's image: the kernel and an initial file system, from Debian packages only.
#
# image.sh FOLDER INIT: FOLDER is replaced, and gets vmlinux, initrd and version. INIT is a file.
# Nothing is installed on this machine. Needs apt with package lists, dpkg-deb, tar, xz.
set -u -o pipefail
shopt -s nullglob

folder=$1 init=$2
packages="busybox-static libibverbs1 ibverbs-providers ibverbs-utils libgcc-s1 iproute2"
# In load order where no dependency says so; dependencies are added.
modules="virtio_pci virtio_console virtio_net 9pnet_virtio 9p
  crc32_generic veth bridge ib_core ib_uverbs rdma_rxe virtio_blk crc32c_generic ext4"

fail() { echo "image: $1" >&2; exit 1; }

work=$(mktemp -d "$folder.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
apt-cache show busybox-static >/dev/null 2>&1 || apt-get update -q >&2
image=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -n1)
[ -n "$image" ] || fail "Debian's package linux-image-amd64 is not known here"

# An empty status file makes apt name everything that is needed, none of it "installed".
: >"$work/status"
mkdir -p "$work/archives/partial"
options=(-qq -y --no-install-recommends -o Dir::State::status="$work/status"
  -o Debug::NoLocking=1 -o Dir::Cache::archives="$work/archives"
  -o APT::Sandbox::User="$(id -un)")
# shellcheck disable=SC2086
apt-get "${options[@]}" --download-only install $packages >&2 || fail "apt cannot download the packages"
(cd "$work" && apt-get -qq -o APT::Sandbox::User="$(id -un)" download "$image") >&2 ||
  fail "apt cannot download $image"

root=$work/root
mkdir -p "$root"/usr/{bin,sbin,lib,lib64} "$root"/{modules,proc,sys,dev,host,etc}
for name in bin sbin lib lib64; do ln -s "usr/$name" "$root/$name"; done
for package in "$work"/archives/*.deb; do
  case ${package##*/} in
    # Wanted by the scripts of other packages only, and no script is run.
    adduser_*|debconf_*|passwd_*|libpam*|libsemanage*|libaudit*|perl-base_*|gcc-*-base_*|pci.ids_*) continue;;
  esac
  dpkg-deb --fsys-tarfile "$package" | tar -C "$root" --keep-directory-symlink -xf - ||
    fail "cannot unpack ${package##*/}"
done
rm -rf "$root"/usr/share/{doc,man,locale,i18n,lintian,bash-completion,bug,misc,perl5} \
  "$root"/usr/lib/*/{gconv,perl*} "$root"/usr/lib/{systemd,udev}

kernel=("$work"/linux-image-*.deb)
dpkg-deb -x "${kernel[0]}" "$work/image" || fail "cannot unpack $image"
boot=("$work"/image/boot/vmlinuz-*)
version=${boot[0]##*/vmlinuz-}
for tree in "$work"/image/{usr/,}lib/modules/"$version"; do [ ! -d "$tree" ] || break; done
declare -A path=()
while IFS= read -r file; do
  name=${file##*/}
  name=${name%%.ko*}
  path[${name//-/_}]=$file
done < <(find "$tree" -name '*.ko' -o -name '*.ko.xz' -o -name '*.ko.zst')

added=
# Copies a module and, first, those that it depends on.
add_module() {
  local name=${1//-/_} dependency
  case " $added " in *" $name "*) return 0;; esac
  added+=" $name"
  if [ -z "${path[$name]-}" ]; then
    grep -q "/${name//_/[-_]}\.ko$" "$tree/modules.builtin" && return 0
    fail "$image has no module $name"
  fi
  case ${path[$name]} in
    *.xz) xz -dc "${path[$name]}";;
    *.zst) zstd -qdc "${path[$name]}";;
    *) cat "${path[$name]}";;
  esac >"$root/modules/$name.ko" || fail "cannot unpack module $name"
  for dependency in $(tr '\0' '\n' <"$root/modules/$name.ko" | sed -n 's/^depends=//p' | head -n1 | tr , ' '); do
    add_module "$dependency"
  done
  echo "$name.ko" >>"$root/modules/order"
}
for name in $modules; do add_module "$name"; done

# Busybox is every command that no package brought.
"$root/bin/busybox" --list-full | while read -r applet; do
  file=$root/usr/${applet#usr/}
  [ -e "$file" ] || [ -L "$file" ] || { mkdir -p "${file%/*}"; ln -s /bin/busybox "$file"; }
done
printf 'root:x:0:0:root:/root:/bin/sh\n' >"$root/etc/passwd"
printf 'root:x:0:\n' >"$root/etc/group"
cp "$init" "$root/init" && chmod 755 "$root/init" || fail "there is no $init"

word() { od -An -tu4 -j "$2" -N4 "$1" | tr -d ' '; }
# The kernel without its compression: qemu starts it through its PVH entry, and it need not unpack
# itself under emulation. Four bytes behind the stream are its length.
bz=${boot[0]}
start=$((($(od -An -tu1 -j 497 -N1 "$bz" | tr -d ' ') + 1) * 512 + $(word "$bz" 584)))
length=$(word "$bz" 588)
case $(od -An -tx1 -j "$start" -N4 "$bz" | tr -d ' \n') in
  fd377a58) unpack="xz -dc";;
  28b52ffd) unpack="zstd -qdc";;
  1f8b*) unpack="gzip -dc";;
  *) fail "$image is compressed in a way that is not known here";;
esac
mkdir -p "$work/out"
tail -c +$((start + 1)) "$bz" | head -c $((length - 4)) | $unpack >"$work/out/vmlinux" 2>/dev/null
[ "$(od -An -tx1 -N4 "$work/out/vmlinux" | tr -d ' \n')" = 7f454c46 ] || fail "cannot unpack the kernel"
(cd "$root" && find . | ./usr/bin/busybox cpio -o -H newc 2>/dev/null) >"$work/out/initrd" ||
  fail "cannot make the initial file system"
echo "$version" >"$work/out/version"
rm -rf "$folder" && mv "$work/out" "$folder"
