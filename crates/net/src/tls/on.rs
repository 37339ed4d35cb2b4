//! TLS by rustls.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::TLS13;
use rustls::{AlertDescription, CertificateError, ClientConfig, ClientConnection, RootCertStore};

use super::{CallerFiles, TlsFilesError};

/// What callers have TLS by: whom they trust, what they show of themselves, and whom they call. Version 1.3 (RFC
/// 8446) without resumption: each connection is looked at anew.
#[derive(Clone)]
pub struct CallerTls {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl fmt::Debug for CallerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallerTls").field("name", &self.name).finish_non_exhaustive()
    }
}

impl CallerTls {
    /// With these files, for calls of this host: a name or an address, for which its certificate is to be.
    pub fn from_files(files: &CallerFiles, host: &str) -> Result<Self, TlsFilesError> {
        Self::new(files, host).map_err(TlsFilesError)
    }

    fn new(files: &CallerFiles, host: &str) -> Result<Self, String> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| format!("no certificate can be for {host:?}"))?;
        let roots = authorities(&files.authorities)?;
        let config = match &files.own {
            None => calling(roots, None).map_err(|error| error.to_string())?,
            Some((chain, key)) => calling(roots, Some((certificates(chain)?, private_key(key)?)))
                .map_err(|error| format!("{}: {error}", key.display()))?,
        };
        Ok(Self { config: Arc::new(config), name })
    }

    /// One connection to this address.
    pub fn session(&self, called: IpAddr) -> io::Result<CallerSession> {
        let (config, name) = self.config(called);
        let connection = ClientConnection::new(config, name);
        connection.map(CallerSession).map_err(io::Error::other)
    }

    /// For whoever has another way to speak TLS with this address. Where there are several controllers, a name is that
    /// of all of them; each address is that of one.
    pub fn config(&self, called: IpAddr) -> (Arc<ClientConfig>, ServerName<'static>) {
        let name = match &self.name {
            ServerName::IpAddress(_) => ServerName::IpAddress(called.to_canonical().into()),
            name => name.clone(),
        };
        (Arc::clone(&self.config), name)
    }
}

/// What who calls has TLS by: version 1.3 without resumption. Who is called is vouched for by these authorities, and is
/// shown this certificate with its key, if he asks.
pub fn calling(
    authorities: impl Into<Arc<RootCertStore>>,
    own: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
) -> Result<ClientConfig, rustls::Error> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(authorities);
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some((chain, key)) => builder.with_client_auth_cert(chain, key)?,
    };
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// The authorities whose certificates are in a file in PEM. The error names the file.
pub fn authorities(path: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(roots)
}

/// The private key of a file in PEM. The error names the file.
pub fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_file(path)
        .map_err(|error| format!("private key {}: {error}", path.display()))
}

/// The certificates of a file in PEM: one at least. The error names the file.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let failed = |error| format!("certificate {}: {error}", path.display());
    let found: Vec<_> =
        CertificateDer::pem_file_iter(path).and_then(Iterator::collect).map_err(failed)?;
    match found.is_empty() {
        true => Err(format!("{}: there is no certificate in it", path.display())),
        false => Ok(found),
    }
}

/// One connection: bytes of messages on one side, records on the other.
pub struct CallerSession(ClientConnection);

impl fmt::Debug for CallerSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CallerSession(***)")
    }
}

impl CallerSession {
    /// Says and hears what comes before the first message, over a stream that blocks for as long as it may.
    pub fn handshake(&mut self, stream: &mut (impl Read + Write)) -> io::Result<()> {
        while self.0.is_handshaking() {
            self.0.complete_io(stream)?;
        }
        self.flush(stream)
    }

    /// Takes bytes that have come of the stream.
    pub fn feed(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.0.read_tls(&mut bytes)?;
            self.0
                .process_new_packets()
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
        Ok(())
    }

    /// Bytes of messages that have come; 0 at the end, and an error (`WouldBlock`) where more is to be fed first.
    pub fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.reader().read(bytes)
    }

    /// Takes bytes of messages, and writes what is to be written.
    pub fn write(&mut self, bytes: &[u8], stream: &mut impl Write) -> io::Result<()> {
        // All of it is taken where what came before was written.
        self.flush(stream)?;
        self.0.writer().write_all(bytes)?;
        self.flush(stream)
    }

    /// Writes what is to be written.
    pub fn flush(&mut self, stream: &mut impl Write) -> io::Result<()> {
        while self.0.wants_write() {
            self.0.write_tls(stream)?;
        }
        Ok(())
    }
}

/// Why TLS has failed, if it is that, as who has called should know it.
pub fn reason(error: &io::Error) -> Option<String> {
    let error = error.get_ref()?.downcast_ref::<rustls::Error>()?;
    Some(explain(error))
}

fn explain(error: &rustls::Error) -> String {
    use CertificateError::{
        Expired, ExpiredContext, NotValidForNameContext, NotValidYet, NotValidYetContext,
        UnknownIssuer,
    };
    let text = match error {
        rustls::Error::InvalidCertificate(fault) => match fault {
            Expired | ExpiredContext { .. } => "its certificate has expired",
            NotValidYet | NotValidYetContext { .. } => {
                "its certificate is not valid yet: is the clock right?"
            }
            NotValidForNameContext { expected, presented } => {
                let names = names_of(presented);
                let called = expected.to_str();
                return format!("it was called {called}, and its certificate is for {names}");
            }
            UnknownIssuer => {
                "none of the authorities that are set here vouches for its certificate"
            }
            fault => return format!("its certificate is refused: {fault}"),
        },
        rustls::Error::AlertReceived(alert) => match alert {
            AlertDescription::CertificateExpired => {
                "it says that our certificate has expired, or is not valid yet"
            }
            AlertDescription::UnknownCA => {
                "it says that no authority that it trusts vouches for our certificate"
            }
            AlertDescription::CertificateRequired => {
                "it asks for a certificate of ours, and none is set here"
            }
            alert => return format!("it ends TLS with {alert:?}"),
        },
        rustls::Error::InvalidMessage(_) => "it does not speak TLS, which is set here",
        error => return error.to_string(),
    };
    text.to_owned()
}

/// The names that a certificate is for, as an error of rustls has them.
pub fn names_of(presented: &[String]) -> String {
    match presented {
        [] => "no name".to_owned(),
        names => names.iter().map(|name| plain(name)).collect::<Vec<_>>().join(", "),
    }
}

/// A name as users write it.
fn plain(name: &str) -> &str {
    let inside = name.split_once('(').map_or(name, |(_, inside)| inside);
    inside.trim_end_matches(')').trim_matches('"')
}
