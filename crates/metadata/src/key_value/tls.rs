//! TLS towards metadata servers: whom to trust, and who we are.

use std::path::PathBuf;

/// The files that TLS towards a metadata server is made with, all in PEM.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct TlsFiles {
    /// Certificates of the authorities that may vouch for a server. Without, those of the system:
    /// `SSL_CERT_FILE` and `SSL_CERT_DIR`, or where it keeps them.
    pub authorities: Option<PathBuf>,
    /// This side's certificate, for servers that ask for one, with those that lead to its authority.
    pub certificate: Option<PathBuf>,
    /// Its private key.
    pub key: Option<PathBuf>,
}

#[cfg(feature = "tls")]
pub(super) use on::{Session, Sessions, fault, fault_of_io};

#[cfg(not(feature = "tls"))]
pub(super) use off::{Session, Sessions, fault, fault_of_io};

#[cfg(feature = "tls")]
mod on {
    use std::io::{Read, Write};
    use std::path::Path;
    use std::sync::Arc;
    use std::{fmt, fs, io};

    use rustls::crypto::ring;
    use rustls::pki_types::pem::{Error as PemError, PemObject};
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    use rustls::{
        AlertDescription, CertificateError, ClientConfig, ClientConnection, RootCertStore, Stream,
    };

    use super::TlsFiles;

    /// What sessions are made with.
    fn config(files: &TlsFiles) -> Result<ClientConfig, String> {
        let authorities = match &files.authorities {
            Some(path) => certificates(path)?,
            None => of_system()?,
        };
        let mut roots = RootCertStore::empty();
        // A system may keep some that today's rules refuse.
        let (usable, _) = roots.add_parsable_certificates(authorities);
        if usable == 0 {
            return Err("there is no certificate of an authority that can be used".to_owned());
        }
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots);
        let (chain, key) = match (&files.certificate, &files.key) {
            (Some(chain), Some(key)) => (certificates(chain)?, private_key(key)?),
            (None, None) => return Ok(builder.with_no_client_auth()),
            _ => return Err("a certificate and its private key go together".to_owned()),
        };
        builder.with_client_auth_cert(chain, key).map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => {
                "the private key is not that of the certificate".to_owned()
            }
            error => format!("the certificate and its private key cannot be used: {error}"),
        })
    }

    /// What sessions with one server have in common: files are read, and authorities looked at, once.
    pub(in crate::key_value) struct Sessions(Arc<ClientConfig>);

    impl fmt::Debug for Sessions {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Sessions(***)")
        }
    }

    impl Sessions {
        /// What is wrong with the files is the error.
        pub(in crate::key_value) fn new(files: &TlsFiles) -> Result<Self, String> {
            Ok(Self(Arc::new(config(files)?)))
        }

        /// A session with the server of this name.
        pub(in crate::key_value) fn with(&self, host: &str) -> Result<Session, String> {
            let name = ServerName::try_from(host.to_owned())
                .map_err(|_| format!("no certificate can be for {host:?}"))?;
            let connection = ClientConnection::new(Arc::clone(&self.0), name);
            connection.map(|it| Session(Box::new(it))).map_err(|error| explain(&error, ""))
        }
    }

    /// One connection: what is said on it, and records.
    pub(in crate::key_value) struct Session(Box<ClientConnection>);

    impl Session {
        /// Says and hears what comes before the first request.
        pub(in crate::key_value) fn handshake(
            &mut self,
            stream: &mut (impl Read + Write),
        ) -> io::Result<()> {
            while self.0.is_handshaking() {
                self.0.complete_io(stream)?;
            }
            Ok(())
        }

        /// The stream in which requests and replies are plain.
        pub(in crate::key_value) fn over<'a, S: Read + Write>(
            &'a mut self,
            stream: &'a mut S,
        ) -> impl Read + Write + 'a {
            Stream::new(&mut *self.0, stream)
        }

        /// Whether nothing has come that was not read.
        pub(in crate::key_value) fn is_at_rest(&self) -> bool {
            self.0.wants_read()
        }
    }

    fn read(path: &Path) -> Result<Vec<u8>, String> {
        fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
    }

    fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
        let pem = read(path)?;
        let found: Vec<_> = CertificateDer::pem_slice_iter(&pem)
            .collect::<Result<_, _>>()
            .map_err(|error| format!("{}: {error}", path.display()))?;
        match found.is_empty() {
            true => Err(format!("{}: there is no certificate in it", path.display())),
            false => Ok(found),
        }
    }

    fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
        PrivateKeyDer::from_pem_slice(&read(path)?).map_err(|error| match error {
            PemError::NoItemsFound => format!("{}: there is no private key in it", path.display()),
            error => format!("{}: {error}", path.display()),
        })
    }

    fn of_system() -> Result<Vec<CertificateDer<'static>>, String> {
        let found = rustls_native_certs::load_native_certs();
        if found.certs.is_empty() {
            let why = found.errors.first().map_or_else(String::new, |error| format!(": {error}"));
            return Err(format!("this system has no certificates of authorities{why}"));
        }
        Ok(found.certs)
    }

    /// What is wrong between two ends of TLS, if that is what a call failed for. `plain` is what URIs of such
    /// servers without TLS begin with.
    pub(in crate::key_value) fn fault(error: &ureq::Error, plain: &str) -> Option<String> {
        match error {
            ureq::Error::Io(error) => fault_of_io(error, plain),
            ureq::Error::Tls(text) => Some((*text).to_owned()),
            _ => None,
        }
    }

    /// The same of a stream.
    pub(in crate::key_value) fn fault_of_io(error: &io::Error, plain: &str) -> Option<String> {
        error.get_ref()?.downcast_ref().map(|error| explain(error, plain))
    }

    fn explain(error: &rustls::Error, plain: &str) -> String {
        use CertificateError::{
            Expired, ExpiredContext, NotValidForName, NotValidForNameContext, NotValidYet,
            NotValidYetContext, UnknownIssuer,
        };
        match error {
            rustls::Error::InvalidCertificate(fault) => match fault {
                Expired | ExpiredContext { .. } => "its certificate has expired".to_owned(),
                NotValidYet | NotValidYetContext { .. } => {
                    "its certificate is not valid yet: is the clock right?".to_owned()
                }
                NotValidForName | NotValidForNameContext { .. } => {
                    format!("its certificate is of another name: {fault}")
                }
                UnknownIssuer => "no authority that is trusted here vouches for its certificate: \
                                  is it in metadata.ca_file?"
                    .to_owned(),
                _ => format!("its certificate is refused: {fault}"),
            },
            rustls::Error::AlertReceived(
                AlertDescription::CertificateRequired | AlertDescription::HandshakeFailure,
            ) => "it asks for a certificate of ours: see metadata.certificate_file".to_owned(),
            // Etcd says this, too, where none was shown.
            rustls::Error::AlertReceived(AlertDescription::BadCertificate) => {
                "it refuses our certificate, or that there is none: see metadata.certificate_file"
                    .to_owned()
            }
            rustls::Error::AlertReceived(AlertDescription::UnknownCA) => {
                "no authority that it trusts vouches for our certificate: see \
                 metadata.certificate_file"
                    .to_owned()
            }
            rustls::Error::AlertReceived(alert) => format!("it refuses TLS with us: {alert:?}"),
            rustls::Error::InvalidMessage(_) => {
                format!("it does not speak TLS: is it a server for {plain}?")
            }
            error => format!("TLS with it failed: {error}"),
        }
    }
}

#[cfg(not(feature = "tls"))]
mod off {
    use std::convert::Infallible;
    use std::io::{self, Read, Write};

    use super::TlsFiles;

    #[derive(Debug)]
    pub(in crate::key_value) struct Sessions(Infallible);

    impl Sessions {
        pub(in crate::key_value) fn new(_: &TlsFiles) -> Result<Self, String> {
            Err("this build has no TLS".to_owned())
        }

        pub(in crate::key_value) fn with(&self, _: &str) -> Result<Session, String> {
            match self.0 {}
        }
    }

    pub(in crate::key_value) struct Session(Infallible);

    impl Session {
        pub(in crate::key_value) fn handshake(
            &mut self,
            _: &mut (impl Read + Write),
        ) -> io::Result<()> {
            match self.0 {}
        }

        pub(in crate::key_value) fn over<'a, S: Read + Write>(
            &'a mut self,
            stream: &'a mut S,
        ) -> impl Read + Write + 'a {
            stream
        }

        pub(in crate::key_value) fn is_at_rest(&self) -> bool {
            match self.0 {}
        }
    }

    pub(in crate::key_value) fn fault(_: &ureq::Error, _: &str) -> Option<String> {
        None
    }

    pub(in crate::key_value) fn fault_of_io(_: &io::Error, _: &str) -> Option<String> {
        None
    }
}
