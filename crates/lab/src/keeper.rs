//! The process that a lab hangs on, and that removes what is left of it.
//!
//! A signal runs no destructor. So the network namespaces belong to processes that read from a pipe
//! whose other end only the owner has: when it closes, whether by `Drop`, Ctrl-C or SIGKILL, they end.
//! The first of them, the keeper, also ends what else runs in the hosts, and removes the folder. It
//! has a process group of its own, so that what ends the owner's group does not end it.

use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::LabError;

/// `$1` is the number of hosts, `$2` the folder. A host is a process that does nothing, of which the
/// keeper says the process id; it notes the namespace.
const KEEPER: &str = r#"
trap '' INT TERM HUP
exec 3<&0
trap 'rm -rf "$2"' EXIT
ip link set lo up || exit
host=0
while [ "$host" -lt "$1" ]; do
    made=$(unshare --net sh -c '
        cat <&3 >/dev/null 2>&1 &
        echo "$! $(readlink /proc/self/ns/net)"') || exit
    # What is to be ended is found by it: an empty pattern would find everything.
    case ${made#* } in net:\[?*\]) ;; *) exit 1 ;; esac
    echo "${made% *}"
    namespaces="$namespaces${namespaces:+
}${made#* }"
    host=$((host + 1))
done
[ -n "$namespaces" ] || exit
exec >/dev/null 2>&1
cat <&3
left() {
    ls -l /proc/[0-9]*/ns/net | grep -F "$namespaces" | sed 's|.* /proc/\([0-9]*\)/.*|\1|'
}
for signal in TERM KILL; do
    tries=0
    while pids=$(left) && [ -n "$pids" ] && [ $tries -lt 50 ]; do
        kill -s "$signal" $pids
        sleep 0.02
        tries=$((tries + 1))
    done
done
"#;

/// The capabilities that making namespaces and links takes: CAP_NET_ADMIN and CAP_SYS_ADMIN.
const NEEDED: u64 = 1 << 12 | 1 << 21;

pub(crate) struct Keeper {
    child: Child,
    /// It is in a user namespace of its own.
    pub(crate) user_namespace: bool,
    /// The process of each host.
    pub(crate) holders: Vec<u32>,
}

impl Keeper {
    /// Makes a network namespace for switches and one for each host.
    pub(crate) fn start(hosts: usize, folder: &Path) -> Result<Self, LabError> {
        let user_namespace = !may_make_namespaces();
        let mut command = command("unshare");
        if user_namespace {
            command.args(["--user", "--map-root-user"]);
        }
        command.args(["--net", "sh", "-c", KEEPER, "keeper"]).arg(hosts.to_string()).arg(folder);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.process_group(0).spawn().map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                LabError::Unavailable("unshare (util-linux) is not installed".to_owned())
            }
            _ => LabError::io("cannot start unshare")(error),
        })?;
        let stdout = child.stdout.take().expect("it is piped");
        let mut keeper = Self { child, user_namespace, holders: Vec::with_capacity(hosts) };
        // Ends after all of them, or with the keeper.
        for line in BufReader::new(stdout).lines().take(hosts) {
            let line = line.map_err(LabError::io("cannot read from the keeper of the lab"))?;
            keeper.holders.extend(line.trim().parse::<u32>());
        }
        if keeper.holders.len() < hosts {
            return Err(keeper.failure());
        }
        Ok(keeper)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Why it ended before its time.
    fn failure(mut self) -> LabError {
        drop(self.child.stdin.take());
        let mut said = String::new();
        if let Some(stderr) = self.child.stderr.take() {
            // What it said last is as much as there is.
            let _ = stderr.take(4096).read_to_string(&mut said);
        }
        unavailable(said.trim())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // Nothing is left to do about a keeper that fails.
        let _ = self.child.wait();
    }
}

/// Why there are no namespaces here.
fn unavailable(said: &str) -> LabError {
    if said.contains("not found") {
        return LabError::Unavailable("ip (iproute2) is not installed".to_owned());
    }
    LabError::Unavailable(format!(
        "network namespaces need root, or that users may make user namespaces (sysctls \
         user.max_user_namespaces, kernel.unprivileged_userns_clone, \
         kernel.apparmor_restrict_unprivileged_userns): {said}"
    ))
}

/// Whether this process has what it takes, without a user namespace.
fn may_make_namespaces() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    bits.is_some_and(|bits| bits & NEEDED == NEEDED)
}

/// A command of the system, also where only root's `PATH` looks.
pub(crate) fn command(program: &str) -> Command {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(program);
    command.env("PATH", format!("{path}:/usr/local/sbin:/usr/sbin:/sbin"));
    command
}
