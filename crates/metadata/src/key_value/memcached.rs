//! `memcached://`: the values are items of a memcached server, with a time to live. `memcacheds://`: the same over TLS.
//!
//! The protocol is the text protocol (protocol.txt of memcached), as far as four commands need it.

use std::fmt;
use std::io::BufRead;

use super::connection::{Dialect, Pool, ReplyError, excerpt, read_line, read_value};
use super::tls::Sessions;
use super::uri::ServerUri;
use super::{KeyValue, KeyValueConfig, KeyValueError, KeyValueErrorKind, TlsFiles, UriError};

const DEFAULT_PORT: u16 = 11211;
const DIALECT: Dialect =
    Dialect { what: "a memcached server", plain: "memcached://", secure: Some("memcacheds://") };
/// Its TLS.
const TLS_SCHEME: &str = "memcacheds";
/// The longest line that is no value: a key, and numbers.
const MAX_LINE: usize = 1024;
/// The longest key.
const MAX_KEY: usize = 250;
/// An item of 1 MiB, unless memcached was told another limit, is a header, a key and a value.
const VALUE_LIMIT: usize = (1 << 20) - 1024;

/// A client of a memcached server: `memcached://host[:port]`, or `memcacheds://` over TLS (memcached 1.6 with `-Z`).
///
/// Keys must be of 250 bytes at most and have neither spaces nor control characters there. Such characters, and
/// `%`, are written as in URIs: `%20`.
pub struct Memcached {
    uri: String,
    seconds: u64,
    pool: Pool,
}

/// A reply, of those that our commands have.
#[derive(Debug, Eq, PartialEq)]
enum Reply {
    Stored,
    Touched,
    Deleted,
    NotFound,
    /// Of `get`: the value, if the key has one.
    Value(Option<Vec<u8>>),
    /// Something that is no success.
    Error(String),
}

impl Memcached {
    /// A client of the server that the URI names. It connects when it is asked something.
    pub fn new(uri: &str, config: KeyValueConfig) -> Result<Self, UriError> {
        Self::with_files(uri, config, &TlsFiles::default())
    }

    /// As [`Memcached::new`], with these files where it speaks TLS, which are read now.
    pub fn with_files(
        uri: &str,
        config: KeyValueConfig,
        files: &TlsFiles,
    ) -> Result<Self, UriError> {
        let given = uri.split_once("://").map_or(uri, |(scheme, _)| scheme);
        let scheme = if given == TLS_SCHEME { TLS_SCHEME } else { "memcached" };
        let parts = ServerUri::parse(uri, scheme, DEFAULT_PORT)?;
        parts.plain()?;
        let host = parts.host()?.clone();
        let sessions = (scheme == TLS_SCHEME).then(|| Sessions::new(files)).transpose();
        let sessions = sessions.map_err(|what| parts.error(what))?;
        let pool = Pool::new(host, DIALECT, sessions, config);
        Ok(Self { uri: parts.to_string(), seconds: config.seconds(), pool })
    }

    /// Sends the request that is made of the key as memcached has it, and reads the reply.
    fn command(
        &self,
        key: &str,
        request: impl FnOnce(&str) -> Vec<u8>,
    ) -> Result<Reply, KeyValueErrorKind> {
        let key = escape(key);
        if key.is_empty() || key.len() > MAX_KEY {
            let message = format!(
                "the key takes {} bytes there, and memcached has keys of 1 to {MAX_KEY}: a shorter \
                 name, or another server",
                key.len()
            );
            return Err(KeyValueErrorKind::Refused { status: None, message });
        }
        let read = |from: &mut dyn BufRead| read_reply(from, &key, VALUE_LIMIT);
        match self.pool.exchange(|_| Ok(()), &request(&key), read)? {
            Reply::Error(message) => Err(refusal(message)),
            reply => Ok(reply),
        }
    }

    fn error(&self, key: &str, kind: KeyValueErrorKind) -> KeyValueError {
        KeyValueError { uri: self.uri.clone(), key: key.to_owned(), kind }
    }
}

impl KeyValue for Memcached {
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, KeyValueError> {
        match self.command(key, |key| format!("get {key}\r\n").into_bytes()) {
            Ok(Reply::Value(value)) => Ok(value),
            Ok(reply) => Err(self.error(key, unexpected(&reply))),
            Err(kind) => Err(self.error(key, kind)),
        }
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), KeyValueError> {
        let (length, limit) = (value.len(), VALUE_LIMIT);
        if length > limit {
            return Err(self.error(key, KeyValueErrorKind::TooLong { length, limit }));
        }
        let request = |key: &str| {
            let line = format!("set {key} 0 {} {length}\r\n", self.seconds);
            [line.as_bytes(), value, b"\r\n"].concat()
        };
        match self.command(key, request) {
            Ok(Reply::Stored) => Ok(()),
            Ok(reply) => Err(self.error(key, unexpected(&reply))),
            Err(kind) => Err(self.error(key, kind)),
        }
    }

    fn refresh(&self, key: &str) -> Result<bool, KeyValueError> {
        let request = |key: &str| format!("touch {key} {}\r\n", self.seconds).into_bytes();
        match self.command(key, request) {
            Ok(Reply::Touched) => Ok(true),
            Ok(Reply::NotFound) => Ok(false),
            Ok(reply) => Err(self.error(key, unexpected(&reply))),
            Err(kind) => Err(self.error(key, kind)),
        }
    }

    fn remove(&self, key: &str) -> Result<(), KeyValueError> {
        match self.command(key, |key| format!("delete {key}\r\n").into_bytes()) {
            Ok(Reply::Deleted | Reply::NotFound) => Ok(()),
            Ok(reply) => Err(self.error(key, unexpected(&reply))),
            Err(kind) => Err(self.error(key, kind)),
        }
    }

    fn limit(&self) -> usize {
        VALUE_LIMIT
    }

    fn uri(&self) -> &str {
        &self.uri
    }
}

impl fmt::Debug for Memcached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memcached").field("uri", &self.uri).finish_non_exhaustive()
    }
}

/// A key as memcached takes it: what it does not take, and `%`, as in URIs. No two keys become one.
fn escape(key: &str) -> String {
    let mut escaped = String::with_capacity(key.len());
    for character in key.chars() {
        match character {
            '%' | '\0'..=' ' | '\x7f' => {
                escaped.push_str(&format!("%{:02X}", u32::from(character)));
            }
            // Controls and spaces of Unicode are bytes that memcached takes.
            _ => escaped.push(character),
        }
    }
    escaped
}

/// What an error of the server means for who called.
fn refusal(message: String) -> KeyValueErrorKind {
    let advice = if message.contains("too large") {
        "its items are shorter than 1 MiB: start it with -I 1m or more"
    } else if message.contains("out of memory") {
        "it has as much as it may: start it with -m and more"
    } else if message.contains("Too many open connections") {
        return KeyValueErrorKind::Unreachable(format!("it is full ({message})"));
    } else if message.contains("unauthenticated") {
        "it asks for a user and a password, which this client does not send"
    } else {
        return KeyValueErrorKind::Refused { status: None, message };
    };
    KeyValueErrorKind::Refused { status: None, message: format!("{advice} ({message})") }
}

/// A reply that the command does not have.
fn unexpected(reply: &Reply) -> KeyValueErrorKind {
    let what = match reply {
        Reply::Stored => "STORED",
        Reply::Touched => "TOUCHED",
        Reply::Deleted => "DELETED",
        Reply::NotFound => "NOT_FOUND",
        Reply::Value(_) => "a value",
        Reply::Error(_) => "an error",
    };
    KeyValueErrorKind::Meaning(format!("{what} is of another command: is it a memcached server?"))
}

/// Reads a reply that has a value of this key at most, of `limit` bytes.
fn read_reply(from: &mut dyn BufRead, key: &str, limit: usize) -> Result<Reply, ReplyError> {
    let line = read_line(from, MAX_LINE)?;
    let malformed = |reason: &str| ReplyError::Malformed(format!("{:?} {reason}", excerpt(&line)));
    match line.as_slice() {
        b"STORED" => return Ok(Reply::Stored),
        b"TOUCHED" => return Ok(Reply::Touched),
        b"DELETED" => return Ok(Reply::Deleted),
        b"NOT_FOUND" => return Ok(Reply::NotFound),
        b"END" => return Ok(Reply::Value(None)),
        _ => {}
    }
    let words: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    match words.as_slice() {
        [b"ERROR" | b"CLIENT_ERROR" | b"SERVER_ERROR" | b"NOT_STORED", ..] => {
            Ok(Reply::Error(excerpt(&line)))
        }
        [b"VALUE", of, flags, length] => {
            if *of != key.as_bytes() {
                return Err(malformed("is of another key"));
            }
            let number = |digits: &[u8]| {
                let plain = digits.iter().all(u8::is_ascii_digit);
                str::from_utf8(digits).ok().filter(|_| plain)?.parse::<usize>().ok()
            };
            let (Some(_), Some(length)) = (number(flags), number(length)) else {
                return Err(malformed("has no flags or no length"));
            };
            let value = read_value(from, length, limit)?;
            match read_line(from, MAX_LINE)?.as_slice() {
                b"END" => Ok(Reply::Value(Some(value))),
                _ => Err(malformed("is not the only value, or has no end")),
            }
        }
        _ => Err(malformed("is no reply")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &[u8]) -> Result<Reply, ReplyError> {
        read_reply(&mut &*bytes, "k", 8)
    }

    #[test]
    fn keys_are_escaped_so_that_none_becomes_another() {
        let cases = [
            ("mooncake/ram/a:1", "mooncake/ram/a:1"),
            ("a b", "a%20b"),
            ("a%20b", "a%2520b"),
            ("a\r\nset", "a%0D%0Aset"),
            ("\0\x7fä\u{a0}", "%00%7Fä\u{a0}"),
        ];
        for (key, escaped) in cases {
            assert_eq!(escape(key), escaped);
        }
    }

    #[test]
    fn a_key_that_does_not_fit_is_refused_without_a_server() {
        let memcached = Memcached::new("memcached://a:1", KeyValueConfig::default()).unwrap();
        for key in [String::new(), "a".repeat(251), " ".repeat(84)] {
            let error = memcached.get(&key).unwrap_err();
            assert!(error.to_string().contains("1 to 250"), "{error}");
        }
    }

    #[test]
    fn uris_have_a_host_and_a_port() {
        let new = |uri| Memcached::new(uri, KeyValueConfig::default());
        assert_eq!(new("memcached://[::1]").unwrap().uri(), "memcached://[::1]:11211");
        for wrong in ["memcached://u:p@a", "memcached://a/b", "memcached://a,b", "memcache://a"] {
            assert!(new(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn replies_by_their_first_word() {
        assert_eq!(read(b"STORED\r\n").unwrap(), Reply::Stored);
        assert_eq!(read(b"END\r\n").unwrap(), Reply::Value(None));
        let value = read(b"VALUE k 0 4\r\na\r\nb\r\nEND\r\n").unwrap();
        assert_eq!(value, Reply::Value(Some(b"a\r\nb".to_vec())));
        for error in ["ERROR", "CLIENT_ERROR bad data chunk", "SERVER_ERROR out of memory"] {
            let reply = read(format!("{error}\r\n").as_bytes()).unwrap();
            assert_eq!(reply, Reply::Error(error.to_owned()));
        }
    }

    #[test]
    fn malformed_replies_say_why() {
        let malformed: [&[u8]; 10] = [
            b"\r\n",
            b"STORED \r\n",
            b"HTTP/1.1 400 Bad Request\r\n",
            b"VALUE other 0 1\r\na\r\nEND\r\n",
            b"VALUE k 0 -1\r\n",
            b"VALUE k 0 18446744073709551616\r\n",
            b"VALUE k x 1\r\na\r\nEND\r\n",
            b"VALUE k 0 1\r\nabc\r\nEND\r\n",
            b"VALUE k 0 1\r\na\r\nVALUE k 0 1\r\na\r\nEND\r\n",
            b"VALUE k 0 1 2 3\r\na\r\nEND\r\n",
        ];
        for bytes in malformed {
            let error = read(bytes).unwrap_err();
            assert!(matches!(error, ReplyError::Malformed(_)), "{bytes:?}: {error:?}");
        }
        let long = read(b"VALUE k 0 18446744073709551615\r\n");
        assert!(matches!(long, Err(ReplyError::TooLong { limit: 8, .. })));
        for closed in [&b""[..], b"END", b"VALUE k 0 1\r\n", b"VALUE k 0 1\r\na\r\nEN"] {
            assert!(matches!(read(closed), Err(ReplyError::Closed)), "{closed:?}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(start in "(VALUE k 0 )?", bytes: Vec<u8>) {
            let bytes = [start.as_bytes(), &bytes].concat();
            if let Ok(Reply::Value(Some(value))) = read_reply(&mut &*bytes, "k", 64) {
                prop_assert!(value.len() <= 64);
            }
        }

        #[test]
        fn values_come_back_as_they_were(value: Vec<u8>) {
            let line = format!("VALUE k 0 {}\r\n", value.len());
            let bytes = [line.as_bytes(), &value, b"\r\nEND\r\n"].concat();
            let reply = read_reply(&mut &*bytes, "k", value.len()).unwrap();
            prop_assert_eq!(reply, Reply::Value(Some(value)));
        }

        #[test]
        fn escaped_keys_have_no_spaces_and_stay_apart(one in "\\PC*|[\\x00-\\x7f]*", other in "\\PC*") {
            let escaped = escape(&one);
            prop_assert!(escaped.bytes().all(|byte| byte > b' ' && byte != 0x7f));
            prop_assert_eq!(escaped == escape(&other), one == other);
        }
    }
}
