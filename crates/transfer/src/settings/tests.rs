use std::fs;
use std::net::Ipv4Addr;
use std::time::Duration;

use millstream_metadata::RedisLogin;
use millstream_verbs::{Driver, Mtu, Provider};

use super::kind::Kind;
use super::*;
use crate::{NvmeofConfig, PeerAffinity, Policy};

fn load(variables: &[(&str, &str)], arguments: &[&str]) -> Result<Settings, String> {
    let pair = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    let sources = Sources {
        file: None,
        variables: variables.iter().map(pair).collect(),
        arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
    };
    Settings::load(&sources).map_err(|error| error.to_string())
}

/// A file of this process, which is removed when it is dropped.
struct TomlFile(PathBuf);

impl TomlFile {
    fn new(name: &str, text: &str) -> Self {
        let name = format!("millstream-settings-{}-{name}.toml", std::process::id());
        let path = env::temp_dir().join(name);
        fs::write(&path, text).unwrap();
        Self(path)
    }

    fn load(&self) -> Result<Settings, String> {
        let sources = Sources { file: Some(self.0.clone()), ..Sources::default() };
        // The folder differs from machine to machine.
        let place = format!("{}/", self.0.parent().unwrap().display());
        Settings::load(&sources).map_err(|error| error.to_string().replace(&place, ""))
    }

    fn name(&self) -> String {
        self.0.file_name().unwrap().to_string_lossy().into_owned()
    }
}

impl Drop for TomlFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn state(settings: &Settings, key: &str) -> (String, String) {
    let state = settings.states().find(|state| state.key == key).unwrap();
    (state.value, state.origin.to_string())
}

#[test]
fn without_sources_all_values_are_those_of_the_types() {
    let settings = load(&[], &[]).unwrap();
    let address = "127.0.0.9".parse().unwrap();
    let (ours, theirs) = (settings.engine(address), Config::new(address));
    assert_eq!(format!("{ours:?}"), format!("{theirs:?}"));
    let (ours, theirs) = (settings.rdma(&[address]), RdmaConfig::new(&[address]));
    assert_eq!(format!("{ours:?}"), format!("{theirs:?}"));
    let (ours, theirs) = (settings.nvmeof(), NvmeofConfig::default());
    assert_eq!(format!("{ours:?}"), format!("{theirs:?}"));
    assert!(settings.states().all(|state| *state.origin == Origin::Default));
    assert_eq!((settings.log_level(), settings.notes()), (None, &[][..]));
}

#[test]
fn the_later_source_comes_first_and_is_named() {
    let file = TomlFile::new(
        "later",
        "slice_size = \"8KiB\"\n[rdma]\nretry_count = 5\nsend_queue_depth = 7\n",
    );
    let variable = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let settings = Settings::load(&Sources {
        file: Some(file.0.clone()),
        variables: vec![variable("MC_RETRY_CNT", "6"), variable("MC_MAX_WR", "8")],
        arguments: vec!["rdma.send_queue_depth=9".to_owned()],
    })
    .unwrap();
    let place = format!("{}:1", file.0.display());
    assert_eq!(state(&settings, "slice_size"), ("8KiB".to_owned(), place));
    assert_eq!(state(&settings, "rdma.retry_count"), ("6".to_owned(), "MC_RETRY_CNT".to_owned()));
    let argument = ("9".to_owned(), "argument".to_owned());
    assert_eq!(state(&settings, "rdma.send_queue_depth"), argument);
    assert_eq!(state(&settings, "fragment_ratio"), ("4".to_owned(), "default".to_owned()));
    let rdma = settings.rdma(&[]);
    assert_eq!((rdma.retry_count, rdma.send_queue_depth), (6, 9));
    assert_eq!(settings.engine([127, 0, 0, 1].into()).slice_length, 8192);
}

#[test]
fn each_variable_of_the_original_has_its_effect() {
    let settings = load(
        &[
            ("MC_SLICE_SIZE", "32768"),
            ("MC_FRAGMENT_RATIO", "2"),
            ("MC_HANDSHAKE_PORT", "12001"),
            ("MC_HANDSHAKE_LISTEN_BACKLOG", "7"),
            ("MC_HANDSHAKE_CONNECT_TIMEOUT", "9"),
            ("MC_HANDSHAKE_MAX_LENGTH", "2097152"),
            ("MC_MIN_PRC_PORT", "15000"),
            ("MC_MAX_RPC_PORT", "17000"),
            ("MC_TCP_BIND_ADDRESS", "192.0.2.7"),
            ("MC_TCP_PROTO", "1"),
            ("MC_TCP_LANES_PER_PEER", "3"),
            ("MC_TCP_PROGRESS_TIMEOUT_SEC", "7"),
            ("MC_TCP_STATUS_TIMEOUT_SEC", "8"),
            ("MC_NUM_QP_PER_EP", "2"),
            ("MC_MAX_WR", "512"),
            ("MC_RETRY_CNT", "9"),
            ("MC_RDMA_RAIL_PAUSE_SECONDS", "5"),
            ("MC_MAX_EP_PER_CTX", "64"),
            ("MC_PATH_ROUNDROBIN", "0"),
            ("MC_MTU", "1024"),
            ("MC_PKEY_INDEX", "3"),
            ("MC_IB_PORT", "2"),
            ("MC_IB_TC", "106"),
            ("MC_IB_SL", "3"),
            ("MC_GID_INDEX", "5"),
            ("MC_IB_PCI_RELAXED_ORDERING", "0"),
            ("MC_TE_FILTERS", "mlx5_0, mlx5_1,"),
            ("MC_LOG_LEVEL", "WARNING"),
        ],
        &["rdma.provider=ibverbs", "soft.driver=packet", "soft.busy_poll=50us", "tcp.busy_poll=0"],
    )
    .unwrap();
    assert_eq!(settings.notes(), &[] as &[String]);
    let engine = settings.engine([127, 0, 0, 1].into());
    assert_eq!((engine.slice_length, engine.fragment_ratio), (32_768, 2));
    assert_eq!((engine.default_port, engine.listen_backlog), (Some(12_001), 7));
    assert_eq!(engine.client.connect_timeout, Duration::from_secs(9));
    assert_eq!((engine.client.frame_limit, engine.server.frame_limit), (2 << 20, 1 << 20));
    assert_eq!((engine.ports, engine.host.as_deref()), (Some(15_000..=17_000), Some("192.0.2.7")));
    let tcp = settings.tcp();
    assert_eq!((tcp.version_one, tcp.messages, tcp.lanes), (true, false, 3));
    let timeouts = (tcp.progress_timeout, tcp.status_timeout);
    assert_eq!(timeouts, (Duration::from_secs(7), Duration::from_secs(8)));
    assert_eq!(tcp.busy_poll, Some(Duration::ZERO));
    assert_eq!(load(&[], &[]).unwrap().tcp().busy_poll, None);
    let rdma = settings.rdma(&[]);
    assert_eq!(rdma.devices, Some(vec!["mlx5_0".to_owned(), "mlx5_1".to_owned()]));
    assert_eq!((rdma.queue_pairs_per_endpoint, rdma.send_queue_depth), (2, 512));
    assert_eq!((rdma.retry_count, rdma.max_endpoints), (9, 64));
    assert_eq!(rdma.max_pause, Duration::from_secs(5));
    assert_eq!((rdma.path_round_robin, rdma.max_path_mtu), (false, Mtu::B1024));
    assert_eq!((rdma.partition_key_index, rdma.provider), (3, Some(Provider::Ibverbs)));
    assert_eq!((rdma.ibverbs.port, rdma.ibverbs.gid_index), (2, Some(5)));
    assert_eq!((rdma.ibverbs.traffic_class, rdma.ibverbs.service_level), (106, 3));
    assert_eq!(rdma.soft.traffic_class, 106);
    assert!(!rdma.ibverbs.relaxed_ordering);
    assert_eq!(
        (rdma.soft.driver, rdma.soft.busy_poll),
        (Driver::Packet, Some(Duration::from_micros(50)))
    );
    assert_eq!(settings.log_level(), Some("warn"));
    assert_eq!(load(&[("MC_TRACE", "1")], &[]).unwrap().log_level(), Some("trace"));
}

/// Each setting takes the ends of its range, and shows what it took as something that it takes.
#[test]
fn bounds_are_values_and_what_is_beyond_is_refused() {
    for setting in settings() {
        let (good, bad) = match setting.kind {
            Kind::Number { least, most, .. } | Kind::Size { least, most, .. } => {
                let below = least.checked_sub(1).map_or("-1".to_owned(), |it| it.to_string());
                (vec![least.to_string(), most.to_string()], vec![below, (most + 1).to_string()])
            }
            Kind::Time { least, most, .. } => {
                let us = |time: Duration| format!("{}us", time.as_micros());
                let above = us(most + Duration::from_micros(1));
                let below = if least.is_zero() { "-1us".to_owned() } else { "0us".to_owned() };
                (vec![us(least), us(most)], vec![below, above])
            }
            Kind::Flag { .. } => (
                ["1", "0", "true", "False", "on", "OFF", "yes", "no"].map(str::to_owned).to_vec(),
                ["2", "-1", "maybe"].map(str::to_owned).to_vec(),
            ),
            Kind::Word { words, others, .. } => {
                let all = words.iter().chain(others.iter().map(|(other, _)| other));
                (all.map(|word| word.to_uppercase()).collect(), vec!["frobnicate".to_owned()])
            }
            Kind::Index { most, .. } => (
                vec!["-1".to_owned(), "0".to_owned(), most.to_string()],
                vec![(u32::from(most) + 1).to_string(), "-2".into(), "+1".into(), "1.5".into()],
            ),
            Kind::Host { .. } => (
                ["host.example", "192.0.2.1", "2001:db8::1", ""].map(str::to_owned).to_vec(),
                ["host:1", "a b", "[::1]:5", "x/y"].map(str::to_owned).to_vec(),
            ),
            Kind::User { .. } => (
                vec!["me".to_owned(), "me@example".to_owned(), "x".repeat(255), String::new()],
                vec!["a b".to_owned(), "a\nb".to_owned(), "x".repeat(256)],
            ),
            Kind::Listen { .. } => (
                ["9464", "0", "192.0.2.1:80", "[::1]:65535", ""].map(str::to_owned).to_vec(),
                ["65536", "-1", "192.0.2.1", "host:1", "::1:5x"].map(str::to_owned).to_vec(),
            ),
            Kind::Peers { most, .. } => {
                let many = |count| vec!["host.example:1"; count].join(",");
                let good = ["192.0.2.1:15001", "a:1 , [2001:db8::1]:2", ""].map(str::to_owned);
                let bad = ["a", "a:1,", ",", "a:0x1", "a:65536"].map(str::to_owned).to_vec();
                ([good.to_vec(), vec![many(most)]].concat(), [bad, vec![many(most + 1)]].concat())
            }
            Kind::Devices { most, .. } => {
                let many = |count| vec!["mlx5_0"; count].join(",");
                let good = ["mlx5_0, rxe0", "all", "ALL", ""].map(str::to_owned).to_vec();
                let bad = vec!["a b".to_owned(), many(most + 1)];
                ([good, vec![many(most)]].concat(), bad)
            }
            Kind::Pairs { .. } => (
                ["a=b", " a = b, c ; d=e;", ""].map(str::to_owned).to_vec(),
                ["a", "a=", "a=b;a=c"].map(str::to_owned).to_vec(),
            ),
            Kind::Folders { most, .. } => {
                let many = |count| vec!["/a"; count].join(":");
                let good = ["/mnt/files", "/mnt/a b:/srv/c=d,e", "/", ""].map(str::to_owned);
                let bad = ["mnt", "/a:b", "/a:", ":", "/a\nb"].map(str::to_owned).to_vec();
                ([good.to_vec(), vec![many(most)]].concat(), [bad, vec![many(most + 1)]].concat())
            }
            Kind::File { .. } => (
                ["/etc/topology.json", "a b.json", ""].map(str::to_owned).to_vec(),
                vec!["x".repeat(4096), "a\nb".to_owned()],
            ),
        };
        for text in good {
            let mut values = Values::default();
            assert!(setting.kind.set(&mut values, &text).is_some(), "{}={text}", setting.key);
            let (shown, json) = (setting.kind.show(&values), setting.kind.json(&values));
            let mut again = Values::default();
            setting.kind.set(&mut again, &shown).unwrap();
            assert_eq!(setting.kind.json(&again), json, "{}={text}, shown as {shown}", setting.key);
        }
        let is_file = matches!(setting.kind, Kind::File { .. });
        let long = (!is_file).then(|| "x".repeat(300));
        for text in bad.into_iter().chain(long).chain(["\u{1b}[2J".to_owned()]) {
            let mut values = Values::default();
            let before = format!("{values:?}");
            // A host may well be a long word, but not as long as this.
            assert!(setting.kind.set(&mut values, &text).is_none(), "{}={text}", setting.key);
            assert_eq!(format!("{values:?}"), before);
        }
    }
}

#[test]
fn listed_pairs_of_nics_come_before_those_of_one_name() {
    let affinity = |variables: &[(&str, &str)]| {
        let address = "127.0.0.9".parse().unwrap();
        load(variables, &[]).unwrap().rdma(&[address]).peer_affinity
    };
    let (pairs, same) = ("MC_NIC_PEER_AFFINITY", "MC_ENABLE_DEST_DEVICE_AFFINITY");
    let listed = PeerAffinity::parse("a=b").unwrap();
    for (variables, expected) in [
        (&[][..], &PeerAffinity::Any),
        (&[(same, "1")], &PeerAffinity::SameName),
        (&[(same, "0")], &PeerAffinity::Any),
        (&[(pairs, "a=b")], &listed),
        (&[(pairs, "a=b"), (same, "1")], &listed),
        (&[(same, "1"), (pairs, "a=b")], &listed),
        (&[(same, "1"), (pairs, "")], &PeerAffinity::SameName),
        (&[(pairs, "")], &PeerAffinity::Any),
    ] {
        assert_eq!(&affinity(variables), expected, "{variables:?}");
    }
    assert!(load(&[(pairs, "a")], &[]).unwrap_err().contains("mlx5_0=mlx5_0,mlx5_1"));
}

#[test]
fn units_and_what_is_none() {
    for (argument, expected) in [
        ("slice_size=65536", Some("64KiB")),
        ("slice_size= 1 mib ", Some("1MiB")),
        ("slice_size=2000", Some("2000")),
        ("slice_size=1.5MiB", None),
        ("slice_size=64KB", None),
        ("slice_size=+65536", None),
        ("slice_size=18446744073709551616", None),
        ("slice_size=17179869184GiB", None),
        ("handshake.connect_timeout=2", Some("2s")),
        ("handshake.connect_timeout=2500ms", Some("2500ms")),
        ("handshake.connect_timeout=1m", Some("1m")),
        ("handshake.connect_timeout=0", None),
        ("soft.busy_poll=1", Some("1ms")),
        ("rdma.patience=0", Some("0s")),
        ("ibverbs.gid_index=-1", Some("-1")),
        ("rdma.devices= rxe0 ,rxe1", Some("rxe0,rxe1")),
        ("rdma.devices=All", Some("all")),
        ("rdma.devices=,", Some("")),
    ] {
        let key = argument.split_once('=').unwrap().0;
        let shown = load(&[], &[argument]).ok().map(|settings| state(&settings, key).0);
        assert_eq!(shown.as_deref(), expected, "{argument}");
    }
}

#[test]
fn a_bad_value_is_told_with_its_place_and_the_range() {
    for (variables, arguments, expected) in [
        (
            &[("MC_SLICE_SIZE", "abc")][..],
            &[][..],
            "MC_SLICE_SIZE=abc: slice_size is a size from 1KiB to 64MiB",
        ),
        (
            &[("MC_GID_INDEX", "300")],
            &[],
            "MC_GID_INDEX=300: ibverbs.gid_index is 0 to 255, or -1 for the best of RoCE v2",
        ),
        (
            &[],
            &["rdma.retry_count=1000"],
            "rdma.retry_count=1000: rdma.retry_count is a whole number from 0 to 127",
        ),
        (
            &[],
            &["rdma.retries=1"],
            "there is no setting \"rdma.retries\"; `millstream config` lists",
        ),
        (&[], &["slice-size=1KiB"], "there is no setting \"slice-size\": is slice_size meant?"),
        (&[], &["slice_size"], "\"slice_size\" is no setting and its value: write NAME=VALUE"),
        (
            &[("MC_MIN_RPC_PORT", "2000")],
            &["handshake.last_port=1000"],
            "handshake.first_port = 2000 (MC_MIN_RPC_PORT), handshake.last_port = 1000 (argument): ",
        ),
        (&[("MC_MAX_RPC_PORT", "2000")], &[], "handshake.first_port = 0 (default), "),
        (
            &[],
            &["nvmeof.first_port=2000"],
            "nvmeof.first_port = 2000 (argument), nvmeof.last_port = 0 (default): ",
        ),
        (
            &[],
            &["nvmeof.mapped_folders=mnt"],
            "nvmeof.mapped_folders=mnt: nvmeof.mapped_folders is paths of folders, each from /, up to 64 ",
        ),
        (
            &[("MC_MAX_WR", "4096")],
            &[],
            "rdma.queue_pairs_per_endpoint = 1 (default), rdma.send_queue_depth = 4096 (MC_MAX_WR), \
             rdma.max_endpoints = 1024 (default): multiplied, they are more than 2097152",
        ),
    ] {
        let error = load(variables, arguments).unwrap_err();
        assert!(error.starts_with(expected), "{error}");
    }
    assert!(load(&[("MC_NUM_QP_PER_EP", "8")], &[]).is_ok(), "with all else as it is");
    // Not the whole of it.
    assert!(load(&[("MC_MTU", &"9".repeat(100_000))], &[]).unwrap_err().len() < 300);
}

#[test]
fn a_bad_file_is_told_with_its_line() {
    for (name, text, expected) in [
        (
            "value",
            "\n[rdma]\nretry_count = 1000\n",
            ":3: rdma.retry_count=1000: rdma.retry_count is",
        ),
        ("kind", "slice_size = [1]\n", ":1: slice_size=[1]: slice_size is a size"),
        (
            "key",
            "[rdma]\nretry_cont = 1\n",
            ":2: there is no setting \"rdma.retry_cont\": is rdma.",
        ),
        ("table", "rdma = 1\n", ":1: there is no setting \"rdma\""),
        ("inside", "slice_size.x = 1\n", ":1: there is no setting \"slice_size.x\": is slice_size"),
        ("syntax", "slice_size = \n", ":1: "),
    ] {
        let file = TomlFile::new(name, text);
        let error = file.load().unwrap_err();
        assert!(error.starts_with(&format!("{}{expected}", file.name())), "{error}");
    }
    let good = TomlFile::new("good", "[soft]\nsegmentation_offload = false\nbusy_poll = 2\n");
    let rdma = good.load().unwrap().rdma(&[]);
    assert!(!rdma.soft.segmentation_offload);
    assert_eq!(rdma.soft.busy_poll, Some(Duration::from_millis(2)));
}

#[test]
fn files_are_mapped_and_offered_as_settings_say() {
    let file = TomlFile::new(
        "nvmeof",
        "[nvmeof]\nmapped_folders = \"/mnt/a:/mnt/b\"\ndirect = false\nsilence = 7\nfirst_port = 2000\n",
    );
    let arguments = [
        "nvmeof.server_name=here:1",
        "nvmeof.last_port=2009",
        "nvmeof.io_timeout=5m",
        "nvmeof.connect_timeout=300ms",
        "nvmeof.max_connections=9",
        "nvmeof.file_engine=threads",
        "nvmeof.silence=8",
    ];
    let sources = Sources {
        file: Some(file.0.clone()),
        variables: Vec::new(),
        arguments: arguments.map(str::to_owned).to_vec(),
    };
    let settings = Settings::load(&sources).unwrap();
    let place = format!("{}:2", file.0.display());
    assert_eq!(state(&settings, "nvmeof.mapped_folders"), ("/mnt/a:/mnt/b".to_owned(), place));
    let argument = ("8s".to_owned(), "argument".to_owned());
    assert_eq!(state(&settings, "nvmeof.silence"), argument);
    let nvmeof = settings.nvmeof();
    assert_eq!(nvmeof.mapped_folders, ["/mnt/a", "/mnt/b"].map(PathBuf::from));
    assert_eq!((nvmeof.server_name.as_deref(), nvmeof.ports), (Some("here:1"), Some(2000..=2009)));
    assert_eq!((nvmeof.direct, nvmeof.max_connections), (false, 9));
    assert_eq!(nvmeof.file_engine, Some(crate::FileEngine::Threads));
    let times = (nvmeof.connect_timeout, nvmeof.silence, nvmeof.io_timeout);
    let (connect, silence) = (Duration::from_millis(300), Duration::from_secs(8));
    assert_eq!(times, (connect, silence, Duration::from_secs(300)));
}

#[test]
fn notes_are_of_variables_that_change_nothing() {
    let settings = load(
        &[
            ("MC_USE_IPV6", "1"),
            ("MC_SLICE_SIZ", "1"),
            ("MC_GID_INDEX", "1"),
            ("NCCL_IB_GID_INDEX", "2"),
            ("MC_MTU", ""),
            ("MC_HOST_minio", "https://example.org"),
            ("PATH", "/bin"),
        ],
        &[],
    )
    .unwrap();
    let expected = [
        "NCCL_IB_GID_INDEX is ignored: MC_GID_INDEX is set, too",
        "MC_SLICE_SIZ is no setting, and is ignored: is MC_SLICE_SIZE meant?",
        "MC_USE_IPV6 is ignored: addresses say what they are",
    ];
    assert_eq!(settings.notes(), expected);
    assert_eq!(settings.rdma(&[]).ibverbs.gid_index, Some(1));
}

#[test]
fn the_token_is_in_a_file_or_in_the_environment_and_is_not_shown() {
    let file = TomlFile::new("token", "0123456789abcdef\n");
    let path = file.0.to_str().unwrap();
    let token = |settings: &Settings| settings.engine([127, 0, 0, 1].into()).client.token;
    assert!(token(&load(&[], &[]).unwrap()).is_none());
    // A secret that is missing where it should be is not as if there were none.
    let empty = load(&[("MILLSTREAM_TOKEN", "")], &[]).unwrap_err();
    assert!(empty.contains("0 bytes"), "{empty}");
    let bytes = load(&[("MILLSTREAM_TOKEN", "\u{fffd}123456789abcdef")], &[]).unwrap_err();
    assert!(bytes.contains("is no text"), "{bytes}");
    let by_variable = load(&[("MILLSTREAM_TOKEN", "0123456789abcdef")], &[]).unwrap();
    let by_file = load(&[("MILLSTREAM_TOKEN_FILE", path)], &[]).unwrap();
    for settings in [&by_variable, &by_file] {
        assert!(token(settings).is_some());
        assert!(!format!("{settings:?}").contains("0123456789abcdef"));
        assert!(!settings.states().any(|state| state.value.contains("0123456789abcdef")));
    }
    let (key, argument) = ("security.token_file", format!("security.token_file={path}"));
    assert_eq!(state(&by_file, key), (path.to_owned(), "MILLSTREAM_TOKEN_FILE".to_owned()));
    let both = load(&[("MILLSTREAM_TOKEN", "0123456789abcdef")], &[&argument]).unwrap_err();
    assert!(both.starts_with("MILLSTREAM_TOKEN and security.token_file = "), "{both}");
    let short = load(&[("MILLSTREAM_TOKEN", "0123456789")], &[]).unwrap_err();
    assert!(short.starts_with("the token has 10 bytes"), "{short}");
    let missing = load(&[], &["security.token_file=/nonexistent/token"]).unwrap_err();
    assert!(missing.starts_with("cannot read the token in /nonexistent/token"), "{missing}");
    // Whoever may read it is told of.
    let mode = |bits| {
        fs::set_permissions(&file.0, fs::Permissions::from_mode(bits)).unwrap();
        load(&[], &[&argument]).unwrap().notes().to_vec()
    };
    assert_eq!(mode(0o600), &[] as &[String]);
    assert_eq!(mode(0o644), [format!("{path}: all users can read the token")]);
}

#[test]
fn the_policy_is_chosen_as_with_the_original() {
    let policy = |variables: &[(&str, &str)], arguments: &[&str]| {
        let settings = load(variables, arguments).unwrap();
        let origin = state(&settings, "transfer.policy").1;
        (settings.engine(Ipv4Addr::LOCALHOST.into()).policy, origin, settings.notes().to_vec())
    };
    let (classic, tent) = (Policy::Classic, Policy::Tent);
    assert_eq!(policy(&[], &[]), (classic, "default".to_owned(), vec![]));
    for name in ["MC_USE_TENT", "MC_USE_TEV1"] {
        assert_eq!(policy(&[(name, "1")], &[]), (tent, name.to_owned(), vec![]));
        assert_eq!(policy(&[(name, "off")], &[]), (classic, name.to_owned(), vec![]));
        assert_eq!(policy(&[(name, "")], &[]), (classic, "default".to_owned(), vec![]), "as none");
    }
    // The first one decides.
    let ignored = "MC_USE_TEV1 is ignored: MC_USE_TENT is set, too".to_owned();
    let both = [("MC_USE_TEV1", "1"), ("MC_USE_TENT", "0")];
    assert_eq!(policy(&both, &[]), (classic, "MC_USE_TENT".to_owned(), vec![ignored]));
    let argument = policy(&[("MC_USE_TENT", "1")], &["transfer.policy=classic"]);
    assert_eq!(argument, (classic, "argument".to_owned(), vec![]));
    let wrong = load(&[("MC_USE_TENT", "maybe")], &[]).unwrap_err();
    assert!(
        wrong.starts_with("MC_USE_TENT=maybe: transfer.policy is one of classic, tent"),
        "{wrong}"
    );
}

#[test]
fn a_policy_file_is_read_with_the_settings() {
    let file = TomlFile::new("classes", "[class.a]\npriority = \"bulk\"\n");
    let path = file.0.display().to_string();
    let settings = load(&[("MC_TENT_CONF", &path), ("MC_USE_TENT", "1")], &[]).unwrap();
    assert_eq!(state(&settings, "transfer.policy_file"), (path.clone(), "MC_TENT_CONF".to_owned()));
    assert_eq!(settings.notes(), &[] as &[String]);
    let classes = settings.engine(Ipv4Addr::LOCALHOST.into()).policy_file.classes;
    assert_eq!((classes.len(), classes[0].priority), (1, crate::PriorityLevel::Bulk));
    // The classic policy has no priorities.
    let settings = load(&[], &[&format!("transfer.policy_file={path}")]).unwrap();
    let note = "priorities of the policy file have an effect with transfer.policy = tent only";
    assert_eq!(settings.notes(), [format!("{path}: {note}")]);
    fs::write(&file.0, "\n[class.a]\npriority = \"urgent\"\n").unwrap();
    let error = load(&[("MC_TENT_CONF", &path)], &[]).unwrap_err();
    let expected = format!("{path}:3: class \"a\": priority is one of latency, normal, bulk");
    assert_eq!(error, expected);
    let error = load(&[("MC_TENT_CONF", "/nonexistent")], &[]).unwrap_err();
    assert!(error.starts_with("cannot read the policy file /nonexistent: "), "{error}");
}

/// What the original is started with is no reason not to start.
#[test]
fn what_the_original_has_in_mc_tent_conf_is_ignored_with_a_note() {
    let original = "{\n\"metadata_type\": \"p2p\",\n\"transports\": {\"tcp\": {\"enable\": true}},\n\"policy\": []}";
    let file = TomlFile::new("original", original);
    let path = file.0.display().to_string();
    let policy_file = |settings: &Settings| state(settings, "transfer.policy_file").0;
    for (value, named) in [(original, "it"), (" {}", "it"), (&path, &path)] {
        let settings = load(&[("MC_TENT_CONF", value), ("MC_USE_TENT", "1")], &[]).unwrap();
        let what = "settings of the original, which change nothing here: docs/policy-file.md";
        assert_eq!(settings.notes(), [format!("MC_TENT_CONF is ignored: {named} has {what}")]);
        assert_eq!(policy_file(&settings), "");
    }
    // Who says that it is a policy file means that.
    let error = load(&[], &[&format!("transfer.policy_file={path}")]).unwrap_err();
    assert!(error.starts_with(&path), "{error}");
    // Ours with a mistake is not taken for another's.
    for text in ["{\"clas\": {}, \"metrics\": {}}", "{\"limit\": {}}", "[clas.a]\n", "{", "{}"] {
        fs::write(&file.0, text).unwrap();
        let read = load(&[("MC_TENT_CONF", &path), ("MC_USE_TENT", "1")], &[]);
        assert!(read.unwrap_err().starts_with(&path), "{text}");
    }
}

#[test]
fn a_certificate_its_key_and_authorities_go_together() {
    let (variable, path) = ("MILLSTREAM_CERTIFICATE_FILE", "/nonexistent/certificate");
    let error = load(&[(variable, path)], &[]).unwrap_err();
    let place = format!("security.certificate_file = {path} ({variable})");
    assert!(error.starts_with(&place), "{error}");
    let reason = match cfg!(feature = "tls") {
        true => "a certificate, its private key and authorities go together",
        false => "this build has no TLS",
    };
    assert!(error.ends_with(reason), "{error}");
    assert!(load(&[], &[]).unwrap().engine([127, 0, 0, 1].into()).client.tls.is_none());
}

#[test]
fn redis_has_the_originals_variables() {
    let login = |variables: &[(&str, &str)], arguments: &[&str]| {
        let settings = load(variables, arguments).unwrap();
        assert_eq!(settings.notes(), &[] as &[String]);
        settings.engine([127, 0, 0, 1].into()).store().redis
    };
    assert_eq!(login(&[], &[]), RedisLogin::default());
    let all = [
        ("MC_REDIS_USERNAME", "me"),
        ("MC_REDIS_PASSWORD", "p@ss word%"),
        ("MC_REDIS_DB_INDEX", "255"),
    ];
    let expected = RedisLogin {
        user: Some("me".to_owned()),
        password: Some(Secret::new("p@ss word%".to_owned())),
        database: Some(255),
    };
    assert_eq!(login(&all, &[]), expected);
    assert_eq!(
        login(&[("MC_REDIS_PASSWORD", ""), ("MC_REDIS_DB_INDEX", "0")], &[]),
        RedisLogin::default()
    );
    let other = login(&all, &["metadata.redis_user=you", "metadata.redis_database=3"]);
    assert_eq!((other.user.as_deref(), other.database), (Some("you"), Some(3)));
    // The password is nowhere to be seen.
    let settings = load(&all, &[]).unwrap();
    let shown: Vec<_> = settings.states().map(|state| state.value).collect();
    assert!(!format!("{shown:?} {settings:?}").contains("p@ss"));
    for wrong in ["256", "-1", "x"] {
        let error = load(&[("MC_REDIS_DB_INDEX", wrong)], &[]).unwrap_err();
        let expected = format!(
            "MC_REDIS_DB_INDEX={wrong}: metadata.redis_database is a whole number from 0 to 255"
        );
        assert!(error.starts_with(&expected), "{error}");
    }
    let error = load(&[("MC_REDIS_PASSWORD", "secret\u{fffd}")], &[]).unwrap_err();
    assert_eq!(error, "MC_REDIS_PASSWORD is no text (UTF-8)");
}
