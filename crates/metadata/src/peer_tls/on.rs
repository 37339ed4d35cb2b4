//! TLS by rustls.

use std::fmt;
use std::io::{self, BufRead, Read, Write};
use std::sync::Arc;

use millstream_net::tls::{authorities, calling, certificates, names_of, private_key};
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, ClientConnection, Connection, ServerConfig,
    ServerConnection,
};

use super::{TlsError, is_pause};
use crate::TlsFiles;

/// Bytes that are read at a time.
const READ: usize = 64 << 10;

/// What an engine has TLS with others by: its certificate, and whom it trusts.
#[derive(Clone)]
pub struct PeerTls {
    calling: Arc<ClientConfig>,
    called: Arc<ServerConfig>,
}

impl fmt::Debug for PeerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerTls(***)")
    }
}

impl PeerTls {
    /// With these files, of which all three are needed. What is wrong with them is the error.
    pub fn from_files(files: &TlsFiles) -> Result<Self, String> {
        let TlsFiles { authorities: Some(ca), certificate: Some(chain), key: Some(key) } = files
        else {
            return Err("a certificate, its private key and authorities go together".to_owned());
        };
        let (roots, path) = (Arc::new(authorities(ca)?), key);
        let (chain, key) = (certificates(chain)?, private_key(path)?);
        let of_key = |error: rustls::Error| format!("{}: {error}", path.display());
        let provider = Arc::new(ring::default_provider());
        let own = (chain.clone(), key.clone_key());
        let calling = calling(Arc::clone(&roots), Some(own)).map_err(of_key)?;
        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider)).build();
        let verifier = verifier.map_err(|error| format!("{}: {error}", ca.display()))?;
        let mut called = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| error.to_string())?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(of_key)?;
        called.send_tls13_tickets = 0;
        called.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Self { calling: Arc::new(calling), called: Arc::new(called) })
    }

    /// The side of who calls somebody by this host.
    pub fn calling(&self, host: &str) -> Result<TlsSession, TlsError> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| TlsError::Other(format!("no certificate can be for {host:?}")))?;
        let connection = ClientConnection::new(Arc::clone(&self.calling), name);
        TlsSession::new(connection.map_err(|error| explain(&error))?.into(), host)
    }

    /// The side of who is called.
    pub fn called(&self) -> Result<TlsSession, TlsError> {
        let connection = ServerConnection::new(Arc::clone(&self.called));
        TlsSession::new(connection.map_err(|error| explain(&error))?.into(), "")
    }
}

/// One connection: bytes of messages on one side, records on the other. It has no socket of its own, and no call
/// waits unless the stream does that it is given.
pub struct TlsSession {
    connection: Connection,
    /// By which host it was called.
    host: String,
    /// What has come and was not looked at yet.
    input: Box<[u8]>,
    start: usize,
    end: usize,
    /// A record of the other end was understood.
    heard: bool,
    borders: Borders,
}

/// Where records begin and end in what has come (RFC 8446 5.1): five bytes, of which the last two are a length, and as
/// many behind them.
#[derive(Debug, Default)]
struct Borders {
    /// Bytes of a header that have come.
    header: usize,
    length: usize,
    /// Bytes that are to come behind it.
    left: usize,
}

impl Borders {
    fn pass(&mut self, mut bytes: &[u8]) {
        while let Some((&byte, behind)) = bytes.split_first() {
            if self.left > 0 {
                let count = self.left.min(bytes.len());
                self.left -= count;
                bytes = &bytes[count..];
                continue;
            }
            self.length = (self.length << 8 | usize::from(byte)) & 0xffff;
            self.header += 1;
            if self.header == 5 {
                (self.header, self.left) = (0, self.length);
            }
            bytes = behind;
        }
    }

    const fn is_amid_record(&self) -> bool {
        self.header > 0 || self.left > 0
    }
}

impl fmt::Debug for TlsSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsSession").field("host", &self.host).finish_non_exhaustive()
    }
}

impl TlsSession {
    #[expect(clippy::unnecessary_wraps, reason = "its callers would wrap it")]
    fn new(mut connection: Connection, host: &str) -> Result<Self, TlsError> {
        // Who gives it more looks first whether all of that before was sent.
        connection.set_buffer_limit(None);
        let input = vec![0; READ].into_boxed_slice();
        let (host, borders) = (host.to_owned(), Borders::default());
        Ok(Self { connection, host, input, start: 0, end: 0, heard: false, borders })
    }

    /// Says and hears what it can of what comes before the first message; whether that is over.
    pub fn handshake(&mut self, stream: &mut (impl Read + Write)) -> io::Result<bool> {
        loop {
            match self.flush(stream) {
                Err(error) if is_pause(&error) => return Ok(false),
                Err(error) if is_gone(&error) => return Err(self.closed().into()),
                result => result?,
            }
            if !self.connection.is_handshaking() {
                return Ok(true);
            }
            match self.fill(stream) {
                Ok(0) => return Err(self.closed().into()),
                Ok(_) => {}
                Err(error) if is_pause(&error) => return Ok(false),
                Err(error) if is_gone(&error) => return Err(self.closed().into()),
                Err(error) => {
                    // It should know why.
                    let _ = self.flush(stream);
                    return Err(error);
                }
            }
        }
    }

    /// The other end has closed the connection in the middle of the handshake.
    fn closed(&self) -> TlsError {
        match self.heard {
            true => TlsError::Other("it closed the connection during the handshake".to_owned()),
            // As who knows of no TLS does.
            false => TlsError::NoTls,
        }
    }

    /// Bytes of messages that have come.
    pub fn ready(&mut self) -> &[u8] {
        self.connection.reader().into_first_chunk().unwrap_or_default()
    }

    /// So many of these were taken.
    pub fn consume(&mut self, count: usize) {
        self.connection.reader().consume(count);
    }

    /// Reads a record, or what has come of it; 0 at the end of the stream. Nothing is ready before.
    pub fn fill(&mut self, stream: &mut (impl Read + ?Sized)) -> io::Result<usize> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            self.end = loop {
                match stream.read(&mut self.input) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    count => break count?,
                }
            };
            if self.end == 0 {
                return Ok(0);
            }
        }
        let count = self.connection.read_tls(&mut &self.input[self.start..self.end])?;
        self.borders.pass(&self.input[self.start..][..count]);
        self.start += count;
        if let Err(error) = self.connection.process_new_packets() {
            return Err(self.name_both(explain(&error)).into());
        }
        self.heard = true;
        Ok(count)
    }

    fn name_both(&self, error: TlsError) -> TlsError {
        match error {
            TlsError::OtherName { certificate, .. } => {
                TlsError::OtherName { called: self.host.clone(), certificate }
            }
            error => error,
        }
    }

    /// Whether the first bytes of a record have come, and not all of it.
    pub fn is_amid_record(&self) -> bool {
        self.borders.is_amid_record()
    }

    /// Takes bytes of messages.
    pub fn accept(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.connection.writer().write_all(bytes)
    }

    /// Whether something is to be written.
    pub fn has_unsent(&self) -> bool {
        self.connection.wants_write()
    }

    /// Writes all that is to be written.
    pub fn flush(&mut self, stream: &mut (impl Write + ?Sized)) -> io::Result<()> {
        while self.connection.wants_write() {
            let mut stream = &mut *stream;
            match self.connection.write_tls(&mut stream) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Whether the other end has closed the connection.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

fn explain(error: &rustls::Error) -> TlsError {
    use CertificateError::{
        Expired, ExpiredContext, NotValidForName, NotValidForNameContext, NotValidYet,
        NotValidYetContext, UnknownIssuer,
    };
    match error {
        rustls::Error::InvalidCertificate(fault) => match fault {
            Expired | ExpiredContext { .. } => TlsError::Expired,
            NotValidYet | NotValidYetContext { .. } => TlsError::NotYet,
            NotValidForNameContext { presented, .. } => {
                let certificate = names_of(presented);
                TlsError::OtherName { called: String::new(), certificate }
            }
            NotValidForName => TlsError::OtherName {
                called: String::new(),
                certificate: "another name".to_owned(),
            },
            UnknownIssuer => TlsError::UnknownAuthority,
            fault => TlsError::Other(format!("its certificate is refused: {fault}")),
        },
        rustls::Error::NoCertificatesPresented => TlsError::NoCertificate,
        rustls::Error::AlertReceived(alert) => match alert {
            AlertDescription::CertificateExpired => {
                TlsError::Refused("our certificate has expired, or is not valid yet")
            }
            AlertDescription::UnknownCA => {
                TlsError::Refused("no authority that it trusts vouches for our certificate")
            }
            AlertDescription::CertificateRequired => {
                TlsError::Refused("a certificate of ours is needed: see security.certificate_file")
            }
            AlertDescription::BadCertificate => {
                TlsError::Refused("our certificate is not the one that it awaits")
            }
            alert => TlsError::Other(format!("it says {alert:?}")),
        },
        rustls::Error::InvalidMessage(_) => TlsError::NoTls,
        error => TlsError::Other(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

    use super::*;

    #[test]
    fn records_end_where_their_headers_say() {
        let records =
            [&[22, 3, 1, 0, 3, 7, 7, 7][..], &[23, 3, 3, 0, 0], &[23, 3, 3, 1, 0]].concat();
        let (mut stream, ends) = (records.clone(), [8, 13, 18 + 256]);
        stream.resize(18 + 256 + 2, 9);
        for portion in [1, 2, 5, 7, 8, 300] {
            let (mut borders, mut passed) = (Borders::default(), 0);
            for bytes in stream.chunks(portion) {
                borders.pass(bytes);
                passed += bytes.len();
                assert_eq!(borders.is_amid_record(), !ends.contains(&passed), "{portion} {passed}");
            }
        }
    }

    /// New keys are a record that is none of a message: nothing more of it is to come.
    #[test]
    fn new_keys_leave_no_record_half_read() {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["host".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &authority).unwrap();
        let folder =
            std::env::temp_dir().join(format!("millstream-new-keys-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = |name: &str, text: &str| {
            std::fs::write(folder.join(name), text).unwrap();
            Some(folder.join(name))
        };
        let files = TlsFiles {
            authorities: file("ca", &authority.pem()),
            certificate: file("certificate", &certificate.pem()),
            key: file("key", &key.serialize_pem()),
        };
        let tls = PeerTls::from_files(&files).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        let (mut one, mut other) = (tls.calling("host").unwrap(), tls.called().unwrap());
        let pass = |from: &mut TlsSession, to: &mut TlsSession| {
            let mut bytes = Vec::new();
            from.flush(&mut bytes).unwrap();
            let mut bytes = &bytes[..];
            while !bytes.is_empty() || to.start < to.end {
                to.fill(&mut bytes).unwrap();
            }
        };
        while one.connection.is_handshaking() || other.connection.is_handshaking() {
            pass(&mut one, &mut other);
            pass(&mut other, &mut one);
        }
        one.connection.refresh_traffic_keys().unwrap();
        pass(&mut one, &mut other);
        assert!(other.ready().is_empty() && !other.is_amid_record());
        one.accept(b"a message").unwrap();
        pass(&mut one, &mut other);
        assert_eq!(other.ready(), b"a message");
        let mut record = Vec::new();
        one.accept(b"another").unwrap();
        one.flush(&mut record).unwrap();
        other.consume(9);
        other.fill(&mut &record[..20]).unwrap();
        assert!(other.is_amid_record());
    }
}
