//! What values a setting can have: how they are read and shown, and where they belong.
//!
//! All sources give text: the environment and arguments have nothing else, and a number or a word of a
//! TOML file is as good as text.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use millstream_metadata::HostPort;
use millstream_topology::PeerAffinity;
use serde_json::Value as Json;

use super::values::Values;

/// What values a setting can have, and the place in [`Values`] that has them. Numbers have bounds, both
/// of which are allowed.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    /// A whole number.
    Number { least: u64, most: u64, read: fn(&Values) -> u64, write: fn(&mut Values, u64) },
    /// A number of bytes.
    Size { least: u64, most: u64, read: fn(&Values) -> u64, write: fn(&mut Values, u64) },
    /// A time. What is only a number counts in `unit`.
    Time {
        unit: Unit,
        least: Duration,
        most: Duration,
        read: fn(&Values) -> Duration,
        write: fn(&mut Values, Duration),
    },
    /// Yes or no.
    Flag { read: fn(&Values) -> bool, write: fn(&mut Values, bool) },
    /// One of these words; `others` mean the same as one of them.
    Word {
        words: &'static [&'static str],
        others: &'static [(&'static str, &'static str)],
        read: fn(&Values) -> &'static str,
        write: fn(&mut Values, &'static str),
    },
    /// A number up to `most`, or -1, which stands for `none`.
    Index {
        most: u8,
        none: &'static str,
        read: fn(&Values) -> Option<u8>,
        write: fn(&mut Values, Option<u8>),
    },
    /// A host name or an address, or nothing, which stands for `none`.
    Host {
        none: &'static str,
        read: fn(&Values) -> Option<&str>,
        write: fn(&mut Values, Option<String>),
    },
    /// A name of a server or of its user, or nothing, which stands for `none`.
    User {
        none: &'static str,
        read: fn(&Values) -> Option<&str>,
        write: fn(&mut Values, Option<String>),
    },
    /// An address and a port, or only a port, which is one of 127.0.0.1; or nothing, which stands for `none`.
    Listen {
        none: &'static str,
        read: fn(&Values) -> Option<SocketAddr>,
        write: fn(&mut Values, Option<SocketAddr>),
    },
    /// Hosts and their ports, `most` of them at most; or nothing, which stands for `none`.
    Peers {
        most: usize,
        none: &'static str,
        read: fn(&Values) -> &[HostPort],
        write: fn(&mut Values, Vec<HostPort>),
    },
    /// Names of devices, `most` of them at most, or `all` of the system, which is a list without names; or nothing,
    /// which stands for `none`.
    Devices {
        most: usize,
        none: &'static str,
        read: fn(&Values) -> Option<&[String]>,
        write: fn(&mut Values, Option<Vec<String>>),
    },
    /// Names of NICs, and the names of others that go with each of them; or nothing.
    Pairs { read: fn(&Values) -> &PeerAffinity, write: fn(&mut Values, PeerAffinity) },
    /// Paths of folders from the root, `most` of them at most; or nothing, which stands for `none`.
    Folders {
        most: usize,
        none: &'static str,
        read: fn(&Values) -> &[PathBuf],
        write: fn(&mut Values, Vec<PathBuf>),
    },
    /// The path of a file, or nothing, which stands for `none`.
    File {
        none: &'static str,
        read: fn(&Values) -> Option<&Path>,
        write: fn(&mut Values, Option<PathBuf>),
    },
}

/// What a time is counted in that is only a number.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Unit {
    Seconds,
    Milliseconds,
}

/// Bytes of a user's name.
const USER_MAX: usize = 255;
/// All devices of the system that work.
const ALL: &str = "all";
/// Bytes of a path, as the kernel has it.
const PATH_MAX: usize = 4095;

const SIZES: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];
const TIMES: [(&str, u64); 5] =
    [("h", 3_600_000_000), ("m", 60_000_000), ("s", 1_000_000), ("ms", 1000), ("us", 1)];

impl Kind {
    /// Reads a value and puts it in its place; `None`, and nothing is changed, when it is none that
    /// the setting can have.
    pub(super) fn set(&self, values: &mut Values, text: &str) -> Option<()> {
        let text = text.trim();
        match *self {
            Self::Number { least, most, write, .. } => {
                let number = whole_number(text)?;
                (least..=most).contains(&number).then(|| write(values, number))
            }
            Self::Size { least, most, write, .. } => {
                let bytes = with_unit(text, &SIZES, "B")?;
                (least..=most).contains(&bytes).then(|| write(values, bytes))
            }
            Self::Time { unit, least, most, write, .. } => {
                let unit = match unit {
                    Unit::Seconds => "s",
                    Unit::Milliseconds => "ms",
                };
                let time = Duration::from_micros(with_unit(text, &TIMES, unit)?);
                (least..=most).contains(&time).then(|| write(values, time))
            }
            Self::Flag { write, .. } => {
                let flag = match text.to_ascii_lowercase().as_str() {
                    "1" | "true" | "on" | "yes" => true,
                    "0" | "false" | "off" | "no" => false,
                    _ => return None,
                };
                write(values, flag);
                Some(())
            }
            Self::Word { words, others, write, .. } => {
                let is = |word: &str| word.eq_ignore_ascii_case(text);
                let other = || others.iter().find(|(other, _)| is(other)).map(|(_, word)| word);
                let word = words.iter().find(|word| is(word)).or_else(other)?;
                write(values, word);
                Some(())
            }
            Self::Index { most, write, .. } => {
                let index = if text == "-1" { None } else { Some(whole_number(text)?) };
                let index = index.map(u8::try_from).transpose().ok()?;
                index.is_none_or(|index| index <= most).then(|| write(values, index))
            }
            Self::Host { write, .. } => {
                let host = (!text.is_empty()).then(|| text.to_owned());
                host.as_deref().is_none_or(is_host).then(|| write(values, host))
            }
            Self::User { write, .. } => {
                let is_odd = |c: char| c.is_control() || c.is_whitespace();
                let is_name = text.len() <= USER_MAX && !text.contains(is_odd);
                let name = (!text.is_empty()).then(|| text.to_owned());
                is_name.then(|| write(values, name))
            }
            Self::Listen { write, .. } => {
                let address = (!text.is_empty()).then(|| listen_address(text));
                let is_address = !matches!(address, Some(None));
                is_address.then(|| write(values, address.flatten()))
            }
            Self::Peers { most, write, .. } => {
                let peers = text.split(',').map(str::trim).filter(|_| !text.is_empty());
                let peers = peers.map(str::parse).collect::<Result<Vec<HostPort>, _>>().ok()?;
                (peers.len() <= most).then(|| write(values, peers))
            }
            Self::Devices { most, write, .. } => {
                let names = || text.split(',').map(str::trim).filter(|name| !name.is_empty());
                let is_name = |name: &str| {
                    name.len() <= USER_MAX
                        && !name.contains(|c: char| c.is_control() || c.is_whitespace())
                };
                let all = text.eq_ignore_ascii_case(ALL);
                let list = || names().filter(|_| !all).map(str::to_owned).collect();
                let fits = names().count() <= most && names().all(is_name);
                fits.then(|| write(values, names().next().map(|_| list())))
            }
            Self::Pairs { write, .. } => {
                PeerAffinity::parse(text).ok().map(|affinity| write(values, affinity))
            }
            Self::Folders { most, write, .. } => {
                // A folder that is not there now may be mounted later.
                let is_path = |path: &&str| {
                    path.starts_with('/')
                        && path.len() <= PATH_MAX
                        && !path.contains(char::is_control)
                };
                let folders = || text.split(':').filter(|_| !text.is_empty());
                let all = folders().count() <= most && folders().all(|path| is_path(&path));
                all.then(|| write(values, folders().map(PathBuf::from).collect()))
            }
            Self::File { write, .. } => {
                let is_path = text.len() <= PATH_MAX && !text.contains(char::is_control);
                let path = (!text.is_empty()).then(|| PathBuf::from(text));
                is_path.then(|| write(values, path))
            }
        }
    }

    /// The value, as it can be written in a file.
    pub(super) fn show(&self, values: &Values) -> String {
        match *self {
            Self::Number { read, .. } => read(values).to_string(),
            Self::Size { read, .. } => show_size(read(values)),
            Self::Time { read, .. } => show_time(read(values)),
            Self::Flag { read, .. } => read(values).to_string(),
            Self::Word { read, .. } => read(values).to_owned(),
            Self::Index { read, .. } => read(values).map_or("-1".to_owned(), |it| it.to_string()),
            Self::Host { read, .. } | Self::User { read, .. } => {
                read(values).unwrap_or_default().to_owned()
            }
            Self::Listen { read, .. } => {
                read(values).map_or(String::new(), |address| address.to_string())
            }
            Self::Peers { read, .. } => show_peers(read(values)),
            Self::Devices { read, .. } => read(values).map_or(String::new(), show_devices),
            Self::Pairs { read, .. } => show_pairs(read(values)),
            Self::Folders { read, .. } => show_folders(read(values)),
            Self::File { read, .. } => {
                read(values).map_or(String::new(), |path| path.display().to_string())
            }
        }
    }

    /// The value as JSON: sizes in bytes, times in microseconds, and null for none.
    pub(super) fn json(&self, values: &Values) -> Json {
        match *self {
            Self::Number { read, .. } | Self::Size { read, .. } => read(values).into(),
            Self::Time { read, .. } => microseconds(read(values)).into(),
            Self::Flag { read, .. } => read(values).into(),
            Self::Word { read, .. } => read(values).into(),
            Self::Index { read, .. } => read(values).into(),
            Self::Host { read, .. } | Self::User { read, .. } => read(values).into(),
            Self::Listen { read, .. } => read(values).map(|address| address.to_string()).into(),
            Self::Peers { read, .. } => show_peers(read(values)).into(),
            Self::Devices { read, .. } => read(values).map(show_devices).into(),
            Self::Pairs { read, .. } => show_pairs(read(values)).into(),
            Self::Folders { read, .. } => show_folders(read(values)).into(),
            Self::File { read, .. } => read(values).map(|path| path.display().to_string()).into(),
        }
    }

    /// What numbers of its JSON count, where that is not plain.
    pub(super) const fn json_unit(&self) -> Option<&'static str> {
        match self {
            Self::Size { .. } => Some("bytes"),
            Self::Time { .. } => Some("us"),
            _ => None,
        }
    }

    /// The values that it can have, in words.
    pub(super) fn range(&self) -> String {
        match *self {
            Self::Number { least, most, .. } => format!("a whole number from {least} to {most}"),
            Self::Size { least, most, .. } => {
                format!("a size from {} to {}", show_size(least), show_size(most))
            }
            Self::Time { unit, least, most, .. } => {
                let unit = match unit {
                    Unit::Seconds => "seconds",
                    Unit::Milliseconds => "milliseconds",
                };
                let (least, most) = (show_time(least), show_time(most));
                format!("a time from {least} to {most} (a plain number is in {unit})")
            }
            Self::Flag { .. } => "true or false (or 1 and 0, on and off)".to_owned(),
            Self::Word { words, others, .. } => {
                let mut text = words.join(", ");
                for (index, (other, word)) in others.iter().enumerate() {
                    let before = if index == 0 { " (also " } else { ", " };
                    // Writing to a string cannot fail.
                    let _ = write!(text, "{before}{other} for {word}");
                }
                text.push_str(if others.is_empty() { "" } else { ")" });
                format!("one of {text}")
            }
            Self::Index { most, none, .. } => format!("0 to {most}, or -1 for {none}"),
            Self::Host { none, .. } => {
                format!("a host name or an address, without a port, or nothing for {none}")
            }
            Self::User { none, .. } => format!("a name without spaces, or nothing for {none}"),
            Self::Listen { none, .. } => {
                format!("ADDRESS:PORT, or a port of 127.0.0.1, or nothing for {none}")
            }
            Self::Peers { most, none, .. } => {
                format!("HOST:PORT, up to {most} with commas between them, or nothing for {none}")
            }
            Self::Devices { most, none, .. } => format!(
                "names of devices, up to {most} with commas between them, or {ALL}, or nothing for {none}"
            ),
            Self::Pairs { .. } => "NICs here, each with those of peers that go with it, such as \
                 mlx5_0=mlx5_0,mlx5_1;mlx5_2=mlx5_3, or nothing"
                .to_owned(),
            Self::Folders { most, none, .. } => {
                format!(
                    "paths of folders, each from /, up to {most} with colons between them, or nothing for {none}"
                )
            }
            Self::File { none, .. } => format!("the path of a file, or nothing for {none}"),
        }
    }
}

/// Where to listen: an address and a port, or only a port, which is one of 127.0.0.1.
pub fn listen_address(text: &str) -> Option<SocketAddr> {
    let loopback = |port| (Ipv4Addr::LOCALHOST, port).into();
    text.parse().ok().or_else(|| Some(loopback(u16::try_from(whole_number(text)?).ok()?)))
}

/// As it is read.
fn show_peers(peers: &[HostPort]) -> String {
    peers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// As it is read.
fn show_devices(names: &[String]) -> String {
    if names.is_empty() { ALL.to_owned() } else { names.join(",") }
}

/// As it is read.
fn show_folders(folders: &[PathBuf]) -> String {
    folders.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(":")
}

/// As it is read. There are no pairs of NICs where it is not by them.
fn show_pairs(affinity: &PeerAffinity) -> String {
    let PeerAffinity::Listed(rules) = affinity else { return String::new() };
    let rule = |(own, peers): &(String, Vec<String>)| format!("{own}={}", peers.join(","));
    rules.iter().map(rule).collect::<Vec<_>>().join(";")
}

fn whole_number(text: &str) -> Option<u64> {
    // The parser of the library takes a plus sign, too.
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if digits { text.parse().ok() } else { None }
}

/// A whole number with one of these units, or with this one when it has none.
fn with_unit(text: &str, units: &[(&str, u64)], default: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = (whole_number(&text[..end])?, text[end..].trim_start());
    let unit = if unit.is_empty() { default } else { unit };
    let (_, scale) = units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?;
    number.checked_mul(*scale)
}

/// The bytes of a size, such as `64MiB`; a plain number is one of bytes.
pub(crate) fn size_of_text(text: &str) -> Option<u64> {
    with_unit(text.trim(), &SIZES, "B")
}

/// The time of a number with a unit, such as `50ms`.
pub(crate) fn time_of_text(text: &str) -> Option<Duration> {
    with_unit(text.trim(), &TIMES, "").map(Duration::from_micros)
}

/// The number with the largest of these units that leaves it whole.
fn largest_unit(number: u64, units: &[(&str, u64)]) -> String {
    let whole = units.iter().find(|(_, scale)| number.is_multiple_of(*scale) && number >= *scale);
    whole.map_or(number.to_string(), |(name, scale)| format!("{}{name}", number / scale))
}

fn show_size(bytes: u64) -> String {
    largest_unit(bytes, &SIZES[..3])
}

fn show_time(time: Duration) -> String {
    // Times are read in microseconds, and no default has less.
    if time.is_zero() { "0s".to_owned() } else { largest_unit(microseconds(time), &TIMES) }
}

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Whether this can stand before `:PORT` in a segment's name.
fn is_host(text: &str) -> bool {
    let has_port =
        text.rsplit_once(':').is_some_and(|_| text.parse::<std::net::Ipv6Addr>().is_err());
    !has_port && HostPort::parse_with_default(text, 1).is_ok()
}
