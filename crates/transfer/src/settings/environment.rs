//! Variables of the environment that begin with `MC_`: those of settings are in the table, where those that the
//! original does not have begin with `MILLSTREAM_`, and the others of the original transfer engine are here, each with
//! the reason why it changes nothing, or with what the bindings make of it.

use std::path::Path;

use super::file::read_file;
use super::table::settings;
use crate::PolicyFile;

/// What names of variables begin with that are looked at.
pub(super) const PREFIX: &str = "MC_";

const NO_GPU: &str = "there are no transports between GPUs yet";
const NOTIFY: &str = "notifications go over TCP, to the port of handshakes";
const METRICS: &str = "metrics are not logged: metrics.listen or --http serves them";
const QUEUE_SIZES: &str = "queues are as long as the settings of rdma make them";

/// Variables of the original that change nothing here, and why.
pub(super) const IGNORED: &[(&str, &str)] = &[
    ("MC_AUTO_GID_MAX_RETRIES", "the GID is chosen once, when a device is opened"),
    ("MC_CONN_PAUSE_TTL_MS", "a peer that does not answer is asked again by rdma.patience"),
    ("MC_DISABLE_METACACHE", "descriptors that have proven out of date are asked for again"),
    ("MC_EFA_CQ_THREADS", "EFA has no reliable connections"),
    ("MC_EFA_NIC_SELECTION", "EFA has no reliable connections"),
    ("MC_ENABLE_HCA_PEER_AFFINITY", "pairs in MC_NIC_PEER_AFFINITY count once they are there"),
    ("MC_ENDPOINT_STORE_TYPE", "endpoints are kept, up to rdma.max_endpoints"),
    ("MC_FORCE_HCA", "rdma.provider = \"ibverbs\" or --protocol rdma:ibverbs does this"),
    ("MC_FORCE_MNNVL", NO_GPU),
    ("MC_INTRANODE_NVLINK", NO_GPU),
    ("MC_INTRA_NVLINK", NO_GPU),
    ("MC_LEGACY_RPC_PORT_BINDING", "the port in a segment's name is the one that is listened at"),
    ("MC_LOG_DIR", "logs go to stderr"),
    ("MC_LOG_RDMA_SLICE_AFFINITY", "the log tells connections, not slices"),
    ("MC_MAX_CONCURRENT_REG_MR", "memory is registered with all devices at once, or with one"),
    ("MC_MAX_CQE_PER_CTX", QUEUE_SIZES),
    ("MC_MAX_INLINE", "slices are never sent inline"),
    ("MC_MAX_SGE", "a work request has one piece"),
    ("MC_MIN_REG_SIZE", "it is of a transport that there is not (barex)"),
    ("MC_MLX5_QP_LAG_PORT_BALANCE", "adapters of one vendor have no settings of their own"),
    ("MC_MLX5_QP_UDP_SPORTS", "adapters of one vendor have no settings of their own"),
    ("MC_NUM_COMP_CHANNELS_PER_CTX", QUEUE_SIZES),
    ("MC_NUM_CQ_PER_CTX", QUEUE_SIZES),
    ("MC_RDMA_NOTIFY_BUFFER_SIZE", NOTIFY),
    ("MC_RDMA_NOTIFY_CONNECT_TIMEOUT_MS", NOTIFY),
    ("MC_RDMA_NOTIFY_ENABLED", NOTIFY),
    ("MC_RDMA_NOTIFY_MAX_PENDING_SENDS", NOTIFY),
    ("MC_RDMA_NOTIFY_OOB_FALLBACK", NOTIFY),
    ("MC_RDMA_NOTIFY_RECV_COUNT", NOTIFY),
    ("MC_RPC_PROTOCOL", "handshakes go over TCP"),
    (
        "MC_SLICE_TIMEOUT",
        "what is posted waits as rdma.acknowledge_timeout says; whole requests have deadlines, as of classes in transfer.policy_file",
    ),
    ("MC_TCP_ADMISSION_TIMEOUT_MS", "a batch has room for its tasks: none waits to be admitted"),
    ("MC_TCP_ENABLE_CONNECTION_POOL", "connections are used again where that can be"),
    (
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER",
        "a batch has room for its tasks: none waits to be admitted",
    ),
    (
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER",
        "a batch has room for its tasks: none waits to be admitted",
    ),
    ("MC_TCP_SLICE_SIZE", "the kernel is given as much as it takes"),
    (
        "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS",
        "descriptors that have proven out of date are asked for again",
    ),
    ("MC_TE_METRIC", METRICS),
    ("MC_TE_METRIC_INTERVAL_SECONDS", METRICS),
    ("MC_TE_RPC_CLIENT_IO_THREADS", "one thread asks all peers"),
    ("MC_TRACK_RDMA_POSTED_SLICES", "what is under way is always known"),
    ("MC_USE_IPV6", "addresses say what they are"),
    ("MC_USE_NVLINK_IPC", NO_GPU),
    ("MC_USE_RDMA_TWOSIDED", "rdma reads and writes from one side only"),
    ("MC_WORKERS_PER_CTX", "who waits for a transfer does its work: there are no worker threads"),
    ("MC_YLT_LOG_LEVEL", "MC_LOG_LEVEL is for all logs"),
];

/// A variable of the original that bindings obey and the command does not.
pub(super) struct OfBindings {
    pub(super) name: &'static str,
    /// What the bindings do.
    pub(super) there: &'static str,
    /// What there is for the command in its place.
    pub(super) here: &'static str,
}

/// These variables.
pub(super) const OF_BINDINGS: &[OfBindings] = &[
    OfBindings {
        name: "MC_FORCE_TCP",
        there: "`mooncake.engine` of Python installs no other transport than `tcp`, and relays, where it is set; so does an \
                engine with `auto_discover` in C where it is not empty",
        here: "--protocol tcp does this",
    },
    OfBindings {
        name: "MC_TRANSFER_TIMEOUT",
        there: "how many seconds a call of `mooncake.engine` of Python may take beside a nanosecond for each byte: 5 or more, 30 \
                by default",
        here: "put and get have --timeout",
    },
];

/// The password of a Redis metadata server. It has no setting, which others could see.
pub(super) const REDIS_PASSWORD: &str = "MC_REDIS_PASSWORD";

/// Variables of other programs (Midnight Commander, the client of MinIO), or what they begin with.
const FOREIGN: &[&str] = &[
    "MC_CONFIG_DIR",
    "MC_CONTROL",
    "MC_DATADIR",
    "MC_HOME",
    "MC_HOST_",
    "MC_KEYMAP",
    "MC_PROFILE_ROOT",
    "MC_SID",
    "MC_SKIN",
    "MC_TMPDIR",
    "MC_XDG_OPEN",
];

/// Whether a variable that is no setting's is one of ours, or meant to be.
pub(super) fn concerns_us(variable: &str) -> bool {
    variable.starts_with(PREFIX)
        && variable != REDIS_PASSWORD
        && !FOREIGN.iter().any(|name| variable.starts_with(name))
}

/// What there is to say of a variable that is no setting's.
pub(super) fn note(variable: &str) -> String {
    if let Some((_, reason)) = IGNORED.iter().find(|(name, _)| *name == variable) {
        return format!("{variable} is ignored: {reason}");
    }
    if let Some(it) = OF_BINDINGS.iter().find(|it| it.name == variable) {
        return format!("{variable} is ignored: {}", it.here);
    }
    let known = settings().flat_map(|setting| setting.variables.iter().copied());
    let known = known.chain(others_of_original()).chain([REDIS_PASSWORD]);
    // Not more of it than fits a line.
    let shown: String = variable.chars().take(80).collect();
    match nearest(variable, known) {
        Some(name) => format!("{shown} is no setting, and is ignored: is {name} meant?"),
        None => format!("{shown} is no setting, and is ignored"),
    }
}

/// The variables of the original that are no settings here.
fn others_of_original() -> impl Iterator<Item = &'static str> {
    let ignored = IGNORED.iter().map(|(name, _)| *name);
    ignored.chain(OF_BINDINGS.iter().map(|it| it.name))
}

/// The setting whose variable the original has for settings of its own.
const POLICY_FILE: &str = "transfer.policy_file";

/// Why a variable of a setting is ignored: what it has is of the original's form. There `MC_TENT_CONF` is JSON with
/// the keys of the original, or the path of a file of that.
pub(super) fn of_original(key: &str, value: &str) -> Option<String> {
    if key != POLICY_FILE {
        return None;
    }
    let what = "settings of the original, which change nothing here: docs/policy-file.md";
    if value.trim_start().starts_with('{') {
        return Some(format!("it has {what}"));
    }
    let path = Path::new(value);
    let is_one = read_file(path).is_ok_and(|text| PolicyFile::is_of_original(&text));
    is_one.then(|| format!("{} has {what}", path.display()))
}

/// The name that differs least from `text`, if one does so little.
pub(crate) fn nearest<'a>(text: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let (distance, name) = names.map(|name| (distance(text, name), name)).min()?;
    // With more, it is a guess.
    (distance <= 2 + name.len() / 8).then_some(name)
}

/// How many characters must be put in, left out or changed to get from one to the other.
fn distance(from: &str, to: &str) -> usize {
    // Longer than any name, so that a long variable costs nothing.
    const MOST: usize = 64;
    let from: Vec<char> = from.chars().take(MOST).collect();
    let mut row: Vec<usize> = (0..=from.len()).collect();
    for (line, right) in to.chars().take(MOST).enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], line + 1);
        for (column, &left) in from.iter().enumerate() {
            let changed = diagonal + usize::from(left != right);
            diagonal = row[column + 1];
            row[column + 1] = changed.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[from.len()]
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// What variables begin with that the original does not have.
    const OWN_PREFIX: &str = "MILLSTREAM_";

    #[test]
    fn the_nearest_name_is_told_where_one_is_near() {
        for (variable, expected) in [
            (
                "MC_SLICE_SIZES",
                "MC_SLICE_SIZES is no setting, and is ignored: is MC_SLICE_SIZE meant?",
            ),
            (
                "MC_RETRY_COUNT",
                "MC_RETRY_COUNT is no setting, and is ignored: is MC_RETRY_CNT meant?",
            ),
            ("MC_GIDINDEX", "MC_GIDINDEX is no setting, and is ignored: is MC_GID_INDEX meant?"),
            ("MC_USETENT", "MC_USETENT is no setting, and is ignored: is MC_USE_TENT meant?"),
            (
                "MC_REDIS_PASSWD",
                "MC_REDIS_PASSWD is no setting, and is ignored: is MC_REDIS_PASSWORD meant?",
            ),
            ("MC_FROBNICATE", "MC_FROBNICATE is no setting, and is ignored"),
            ("MC_USE_IPV6", "MC_USE_IPV6 is ignored: addresses say what they are"),
            ("MC_FORCE_TCP", "MC_FORCE_TCP is ignored: --protocol tcp does this"),
            ("MC_FORCE_TPC", "MC_FORCE_TPC is no setting, and is ignored: is MC_FORCE_TCP meant?"),
        ] {
            assert_eq!(note(variable), expected);
        }
        let long = note(&format!("MC_{}", "X".repeat(100_000)));
        assert!(long.len() < 200 && long.ends_with("is no setting, and is ignored"), "{long}");
    }

    #[test]
    fn variables_of_other_programs_are_theirs() {
        assert!(concerns_us("MC_SLICE_SIZES") && concerns_us("MC_USE_TENT"));
        assert!(
            !concerns_us("MC_HOST_play")
                && !concerns_us("MC_SID")
                && !concerns_us(REDIS_PASSWORD)
                && !concerns_us("PATH")
        );
        let known = settings().flat_map(|setting| setting.variables.iter().copied());
        for name in known.chain(others_of_original()) {
            let others = name == "NCCL_IB_GID_INDEX" || name.starts_with(OWN_PREFIX);
            assert_ne!(concerns_us(name), others, "{name}");
        }
    }

    #[test]
    fn distances() {
        for (from, to, expected) in
            [("", "", 0), ("abc", "", 3), ("", "abc", 3), ("abc", "axc", 1), ("abcd", "bcd", 1)]
        {
            assert_eq!(distance(from, to), expected, "{from} {to}");
        }
    }

    #[test]
    fn a_variable_has_one_meaning() {
        let mut seen = HashSet::new();
        let variables = settings().flat_map(|setting| setting.variables.iter().copied());
        for name in variables.chain(others_of_original()) {
            assert!(seen.insert(name), "{name}");
            let ours = [PREFIX, OWN_PREFIX].iter().any(|prefix| name.starts_with(prefix));
            assert!(ours || name == "NCCL_IB_GID_INDEX", "{name}");
        }
        assert!(IGNORED.is_sorted(), "so that one is found");
    }
}
