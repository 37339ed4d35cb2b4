//! Values by keys over HTTP, as Mooncake's metadata server keeps them: `GET`, `PUT` and `DELETE` of
//! `http://host:port/metadata?key=KEY`, or `https://`.

use std::io;
use std::time::Duration;

use ureq::http::Response;
use ureq::{Agent, Body};

use super::agent::Names;
use super::securing::Stalled;
use super::tls::{self, Sessions};
use super::{KeyValue, KeyValueError, KeyValueErrorKind, TlsFiles, last_words};

/// What URIs begin with.
const SCHEME: &str = "http://";
const TLS_SCHEME: &str = "https://";

/// Where the original's server has its values, for URIs without a path.
const PATH: &str = "/metadata";

/// How long connecting may take, and a whole call.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(1500);
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// The most bytes of a value. The server has a limit of its own; this is that of descriptors.
const VALUE_LIMIT: usize = 1 << 20;

/// Characters of a server's refusal that errors repeat.
const EXCERPT: usize = 200;

/// Status codes that mean something here.
const OK: u16 = 200;
const NOT_FOUND: u16 = 404;

/// A client of Mooncake's metadata server, or of ours.
#[derive(Debug)]
pub struct HttpKeyValue {
    uri: String,
    agent: Agent,
}

/// What is wrong with a URI of a server.
fn fault(rest: &str) -> Option<&'static str> {
    let authority = rest.split('/').next().unwrap_or_default();
    if authority.is_empty() {
        return Some("it names no host");
    }
    if authority.contains('@') {
        return Some("it names a user, which metadata servers do not know");
    }
    if rest.contains(['?', '#']) || rest.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Some("it goes on after the path");
    }
    None
}

impl HttpKeyValue {
    /// A client of the server with this URI. What is wrong with the URI is the error. Does not connect.
    pub fn new(uri: &str) -> Result<Self, String> {
        Self::with_files(uri, &TlsFiles::default())
    }

    /// As [`HttpKeyValue::new`], with these files where the URI is `https://`, which are read now.
    pub fn with_files(uri: &str, files: &TlsFiles) -> Result<Self, String> {
        let (scheme, rest) = [SCHEME, TLS_SCHEME]
            .into_iter()
            .find_map(|scheme| Some((scheme, uri.strip_prefix(scheme)?)))
            .ok_or("it does not begin with http:// or https://")?;
        if let Some(fault) = fault(rest) {
            return Err(fault.to_owned());
        }
        let path = if rest.contains('/') { "" } else { PATH };
        let config = Agent::config_builder()
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_global(Some(CALL_TIMEOUT))
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            // Metadata is near. A proxy that is meant for the internet does not know the way.
            .proxy(None)
            // Less than the interval at which entries are refreshed, after which servers may close.
            .max_idle_age(CALL_TIMEOUT);
        let uri = format!("{scheme}{rest}{path}");
        if let Err(error) = uri.parse::<ureq::http::Uri>() {
            return Err(error.to_string());
        }
        let sessions = (scheme == TLS_SCHEME).then(|| Sessions::new(files)).transpose()?;
        let connector = last_words::connector(sessions);
        Ok(Self { uri, agent: Agent::with_parts(config.build(), connector, Names) })
    }

    fn error(&self, key: &str, kind: KeyValueErrorKind) -> KeyValueError {
        KeyValueError { uri: self.uri.clone(), key: key.to_owned(), kind }
    }

    fn failed(&self, key: &str, error: ureq::Error) -> KeyValueError {
        self.error(key, kind_of(error))
    }

    fn target(&self, key: &str) -> String {
        format!("{}?key={}", self.uri, escaped(key))
    }

    /// The server's reply, whole.
    fn reply(&self, key: &str, response: Response<Body>) -> Result<(u16, Vec<u8>), KeyValueError> {
        let status = response.status().as_u16();
        let body = response.into_body().into_with_config().limit(VALUE_LIMIT as u64 + 1);
        match body.read_to_vec() {
            Ok(body) => Ok((status, body)),
            Err(ureq::Error::BodyExceedsLimit(_)) => {
                let what = format!("it is longer than the {VALUE_LIMIT} bytes of a value");
                Err(self.error(key, KeyValueErrorKind::Meaning(what)))
            }
            Err(error) => Err(self.failed(key, error)),
        }
    }

    fn refused(&self, key: &str, status: u16, body: &[u8]) -> KeyValueError {
        let text = String::from_utf8_lossy(body);
        let printable = text.chars().filter(|c| !c.is_control()).take(EXCERPT);
        let mut message: String = printable.collect();
        if (300..400).contains(&status) {
            message =
                "it redirects, which a metadata server does not: is the URI right?".to_owned();
        }
        self.error(key, KeyValueErrorKind::Refused { status: Some(status), message })
    }
}

impl KeyValue for HttpKeyValue {
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, KeyValueError> {
        let response = self.agent.get(self.target(key)).call();
        let response = response.map_err(|error| self.failed(key, error))?;
        match self.reply(key, response)? {
            (OK, value) => Ok(Some(value)),
            (NOT_FOUND, _) => Ok(None),
            (status, body) => Err(self.refused(key, status, &body)),
        }
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), KeyValueError> {
        if value.len() > VALUE_LIMIT {
            let kind = KeyValueErrorKind::TooLong { length: value.len(), limit: VALUE_LIMIT };
            return Err(self.error(key, kind));
        }
        let request = self.agent.put(self.target(key)).content_type("application/json");
        let response = request.send(value).map_err(|error| self.failed(key, error))?;
        match self.reply(key, response)? {
            (OK, _) => Ok(()),
            (status, body) => Err(self.refused(key, status, &body)),
        }
    }

    fn refresh(&self, key: &str) -> Result<bool, KeyValueError> {
        Ok(self.get(key)?.is_some())
    }

    fn remove(&self, key: &str) -> Result<(), KeyValueError> {
        let response = self.agent.delete(self.target(key)).call();
        let response = response.map_err(|error| self.failed(key, error))?;
        match self.reply(key, response)? {
            (OK | NOT_FOUND, _) => Ok(()),
            (status, body) => Err(self.refused(key, status, &body)),
        }
    }

    fn limit(&self) -> usize {
        VALUE_LIMIT
    }

    fn uri(&self) -> &str {
        &self.uri
    }
}

/// What went wrong below HTTP, and what to do about it.
fn kind_of(error: ureq::Error) -> KeyValueErrorKind {
    use KeyValueErrorKind::{Meaning, Unreachable, Untrusted};
    if let Some(fault) = tls::fault(&error, SCHEME) {
        return Untrusted(fault);
    }
    match error {
        error if Stalled::is(&error) => Unreachable(format!(
            "{Stalled}: has it stopped, or is it a server without TLS ({SCHEME})?"
        )),
        ureq::Error::HostNotFound => {
            Unreachable("its host name has no address: is it spelled right?".to_owned())
        }
        ureq::Error::ConnectionFailed => Unreachable("cannot connect: is it up?".to_owned()),
        ureq::Error::Timeout(ureq::Timeout::Connect) => Unreachable(format!(
            "no answer within {CONNECT_TIMEOUT:?}: is its machine up, and does a firewall let the \
             connection through?"
        )),
        ureq::Error::Timeout(_) => Unreachable(format!("no whole reply within {CALL_TIMEOUT:?}")),
        ureq::Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            Unreachable("connection refused: is the server running there?".to_owned())
        }
        ureq::Error::Io(error) => Unreachable(format!("the connection failed: {error}")),
        error => Meaning(format!("{error}: is it a metadata server?")),
    }
}

/// A key as a query has it: letters and digits, the rest as `%` and two hexadecimal digits (RFC 3986 2.1).
fn escaped(key: &str) -> String {
    let mut escaped = String::with_capacity(key.len() + 8);
    for byte in key.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::thread::{self, JoinHandle};

    use super::*;

    /// Answers each connection with one of these texts, and tells what it was asked.
    fn server(replies: Vec<Vec<u8>>) -> (String, JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let uri = format!("http://{}/metadata", listener.local_addr().unwrap());
        let asked = thread::spawn(move || {
            let answer = |reply: Vec<u8>| {
                let (mut stream, _) = listener.accept().unwrap();
                let request = request(&mut stream);
                // It may have gone away.
                let _ = stream.write_all(&reply);
                request
            };
            replies.into_iter().map(answer).collect()
        });
        (uri, asked)
    }

    /// A request, up to the end of its body.
    fn request(stream: &mut TcpStream) -> String {
        let mut text = Vec::new();
        loop {
            let whole = String::from_utf8_lossy(&text).into_owned();
            if let Some((head, body)) = whole.split_once("\r\n\r\n") {
                let length = head.to_ascii_lowercase().lines().find_map(|line| {
                    line.strip_prefix("content-length: ").map(|it| it.parse::<usize>().unwrap())
                });
                if body.len() >= length.unwrap_or(0) {
                    return whole;
                }
            }
            let mut chunk = [0; 1024];
            let count = stream.read(&mut chunk).unwrap();
            if count == 0 {
                return whole;
            }
            text.extend_from_slice(&chunk[..count]);
        }
    }

    fn reply(status: &str, body: &str) -> Vec<u8> {
        let length = body.len();
        let head = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close");
        format!("{head}\r\n\r\n{body}").into_bytes()
    }

    #[test]
    fn requests_are_the_originals() {
        let (uri, asked) = server(vec![
            reply("200 OK", r#"{"a":1}"#),
            reply("404 Not Found", "metadata not found"),
            reply("200 OK", "metadata updated"),
            reply("200 OK", "metadata deleted"),
            reply("404 Not Found", "metadata not found"),
            reply("200 OK", "x"),
            reply("404 Not Found", "metadata not found"),
        ]);
        let client = HttpKeyValue::new(&uri).unwrap();
        assert_eq!(client.get("mooncake/ram/a:1").unwrap().unwrap(), br#"{"a":1}"#);
        assert_eq!(client.get("b").unwrap(), None);
        client.put("mooncake/ram/a b", b"{}").unwrap();
        client.remove("c").unwrap();
        client.remove("c").unwrap();
        assert!(client.refresh("c").unwrap());
        assert!(!client.refresh("c").unwrap());
        let asked = asked.join().unwrap();
        let lines: Vec<_> = asked.iter().map(|it| it.lines().next().unwrap()).collect();
        assert_eq!(
            lines,
            [
                "GET /metadata?key=mooncake%2Fram%2Fa%3A1 HTTP/1.1",
                "GET /metadata?key=b HTTP/1.1",
                "PUT /metadata?key=mooncake%2Fram%2Fa%20b HTTP/1.1",
                "DELETE /metadata?key=c HTTP/1.1",
                "DELETE /metadata?key=c HTTP/1.1",
                "GET /metadata?key=c HTTP/1.1",
                "GET /metadata?key=c HTTP/1.1",
            ]
        );
        assert!(asked[2].ends_with("\r\n\r\n{}"), "{}", asked[2]);
        assert!(asked[2].to_ascii_lowercase().contains("content-type: application/json"));
    }

    #[test]
    fn refusals_say_what_the_server_said() {
        let (uri, asked) = server(vec![
            reply("500 Internal Server Error", "disk\r\n\x1b[31m full"),
            reply("400 Bad Request", "Duplicate rpc_meta key not allowed"),
            reply("302 Found", ""),
        ]);
        let client = HttpKeyValue::new(&uri).unwrap();
        let error = client.get("k").unwrap_err();
        assert!(error.is_transient());
        assert_eq!(
            error.to_string(),
            format!("metadata server {uri}, key \"k\": it refused: status 500, disk[31m full")
        );
        let error = client.put("k", b"v").unwrap_err();
        assert!(!error.is_transient());
        assert!(error.to_string().ends_with("status 400, Duplicate rpc_meta key not allowed"));
        let error = client.get("k").unwrap_err();
        assert!(error.to_string().contains("it redirects"), "{error}");
        asked.join().unwrap();
    }

    #[test]
    fn servers_that_lie_or_break_off_are_errors() {
        let long = "x".repeat(VALUE_LIMIT + 10);
        let endless = format!("HTTP/1.1 200 OK\r\nA: {}", "b".repeat(1 << 20));
        let cases: Vec<(Vec<u8>, bool)> = vec![
            (b"SSH-2.0-OpenSSH_9.2\r\n".to_vec(), false),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(), false),
            (reply("200 OK", &long), false),
            (endless.into_bytes(), false),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615\r\n\r\nx".to_vec(), true),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx".to_vec(), true),
            (b"HTTP/1.1 200 OK\r\nConte".to_vec(), true),
            (Vec::new(), true),
        ];
        let (replies, transient): (Vec<_>, Vec<_>) = cases.into_iter().unzip();
        let (uri, asked) = server(replies);
        let client = HttpKeyValue::new(&uri).unwrap();
        for (index, transient) in transient.into_iter().enumerate() {
            let error = client.get("k").unwrap_err();
            assert!(error.to_string().starts_with(&format!("metadata server {uri}, key")));
            assert_eq!(error.is_transient(), transient, "{index}: {error}");
        }
        asked.join().unwrap();
    }

    #[test]
    fn a_server_that_is_not_there_or_silent_is_an_error_in_time() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap();
        let client = HttpKeyValue::new(&format!("http://{address}")).unwrap();
        let error = client.put("k", b"v").unwrap_err().to_string();
        assert!(error.contains("no whole reply within 3s"), "{error}");
        drop(silent);
        let error = client.get("k").unwrap_err();
        assert!(error.is_transient());
        let expected = format!("metadata server http://{address}/metadata, key \"k\": connection");
        assert!(error.to_string().starts_with(&expected), "{error}");
    }

    #[test]
    fn what_is_too_long_is_not_sent() {
        let client = HttpKeyValue::new("http://127.0.0.1:1/metadata").unwrap();
        let error = client.put("k", &vec![b'x'; VALUE_LIMIT + 1]).unwrap_err();
        assert!(matches!(error.kind, KeyValueErrorKind::TooLong { .. }), "{error}");
    }

    #[test]
    fn uris_that_are_none() {
        for uri in [
            "http://",
            "http:///metadata",
            "http://user:secret@host/metadata",
            "http://a b/metadata",
            "http://host/metadata?key=x",
            "http://host/metadata#x",
            "https://",
            "https://user:secret@host/metadata",
        ] {
            let fault = HttpKeyValue::new(uri).unwrap_err();
            assert!(!fault.contains("secret"), "{fault}");
        }
        if cfg!(not(feature = "tls")) {
            assert_eq!(HttpKeyValue::new("https://a").unwrap_err(), "this build has no TLS");
        }
        assert_eq!(
            HttpKeyValue::new("http://[::1]:8080").unwrap().uri(),
            "http://[::1]:8080/metadata"
        );
    }
}
