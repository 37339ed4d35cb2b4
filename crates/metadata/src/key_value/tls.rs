//! TLS towards metadata servers: whom to trust, and who we are.

use std::path::PathBuf;

use ureq::config::ConfigBuilder;
use ureq::typestate::AgentScope;

type Builder = ConfigBuilder<AgentScope>;

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
pub(super) use on::{fault, with_tls};

#[cfg(not(feature = "tls"))]
pub(super) use off::{fault, with_tls};

#[cfg(feature = "tls")]
mod on {
    use std::path::Path;
    use std::sync::Arc;
    use std::{fs, io};

    use rustls::crypto::ring;
    use rustls::{AlertDescription, CertificateError};
    use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig};

    use super::{Builder, TlsFiles};

    /// The HTTP client's configuration with TLS; what is wrong with the files is the error.
    pub(in crate::key_value) fn with_tls(
        builder: Builder,
        files: &TlsFiles,
    ) -> Result<Builder, String> {
        let authorities = match &files.authorities {
            Some(path) => certificates(path)?,
            None => of_system()?,
        };
        let client = match (&files.certificate, &files.key) {
            (Some(chain), Some(key)) => {
                let chain = certificates(chain)?;
                let key = PrivateKey::from_pem(&read(key)?)
                    .map_err(|_| format!("{}: there is no private key in it", key.display()))?;
                Some(ClientCert::new_with_certs(&chain, key))
            }
            (None, None) => None,
            _ => return Err("a certificate and its private key go together".to_owned()),
        };
        let config = TlsConfig::builder()
            .root_certs(RootCerts::new_with_certs(&authorities))
            .client_cert(client)
            .unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()))
            .build();
        Ok(builder.tls_config(config))
    }

    fn read(path: &Path) -> Result<Vec<u8>, String> {
        fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
    }

    fn certificates(path: &Path) -> Result<Vec<Certificate<'static>>, String> {
        let pem = read(path)?;
        let items = ureq::tls::parse_pem(&pem).filter_map(|item| match item {
            Ok(ureq::tls::PemItem::Certificate(certificate)) => Some(Ok(certificate)),
            Ok(_) => None,
            Err(error) => Some(Err(error)),
        });
        let found: Vec<_> = items
            .collect::<Result<_, _>>()
            .map_err(|error| format!("{}: {error}", path.display()))?;
        match found.is_empty() {
            true => Err(format!("{}: there is no certificate in it", path.display())),
            false => Ok(found),
        }
    }

    fn of_system() -> Result<Vec<Certificate<'static>>, String> {
        let found = rustls_native_certs::load_native_certs();
        let own = |der: &rustls::pki_types::CertificateDer<'_>| {
            Certificate::from_der(der.as_ref()).to_owned()
        };
        if found.certs.is_empty() {
            let why = found.errors.first().map_or_else(String::new, |error| format!(": {error}"));
            return Err(format!("this system has no certificates of authorities{why}"));
        }
        Ok(found.certs.iter().map(own).collect())
    }

    /// What is wrong between two ends of TLS, if that is what a call failed for.
    pub(in crate::key_value) fn fault(error: &ureq::Error) -> Option<String> {
        let of_io = |error: &io::Error| error.get_ref()?.downcast_ref().map(explain);
        match error {
            ureq::Error::Rustls(error) => Some(explain(error)),
            ureq::Error::Io(error) => of_io(error),
            ureq::Error::Tls(text) => Some((*text).to_owned()),
            _ => None,
        }
    }

    fn explain(error: &rustls::Error) -> String {
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
            rustls::Error::AlertReceived(alert) => format!("it refuses TLS with us: {alert:?}"),
            rustls::Error::InvalidMessage(_) => {
                "it does not speak TLS: is it an http:// server?".to_owned()
            }
            error => format!("TLS with it failed: {error}"),
        }
    }
}

#[cfg(not(feature = "tls"))]
mod off {
    use super::{Builder, TlsFiles};

    pub(in crate::key_value) fn with_tls(_: Builder, _: &TlsFiles) -> Result<Builder, String> {
        Err("this build has no TLS".to_owned())
    }

    pub(in crate::key_value) fn fault(_: &ureq::Error) -> Option<String> {
        None
    }
}
