//! TLS of the daemons. Who is admitted: everybody, or over TLS, also those only for whom an authority vouches. And the
//! side of a daemon that calls another one.

use std::path::PathBuf;

/// The files that a server proves itself with, all in PEM.
#[derive(Clone, Debug)]
pub struct ServerTls {
    /// Its certificate, with those that lead to its authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Certificates of the authorities that vouch for clients. Without, clients need no certificate.
    pub client_authorities: Option<PathBuf>,
}

#[cfg(not(feature = "tls"))]
pub(crate) use off::{Called, Guard, call};
#[cfg(feature = "tls")]
pub(crate) use on::{Called, Guard, call};

#[cfg(feature = "tls")]
mod on {
    use std::io;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::task::{Context, Poll};
    use std::time::Duration;

    use millstream_net::tls::{CallerTls, certificates};
    use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
    use tokio::net::TcpStream;
    use tokio::time::timeout;
    use tokio_rustls::TlsStream;
    use tokio_rustls::rustls::crypto::ring;
    use tokio_rustls::rustls::pki_types::PrivateKeyDer;
    use tokio_rustls::rustls::pki_types::pem::PemObject;
    use tokio_rustls::rustls::server::WebPkiClientVerifier;
    use tokio_rustls::rustls::{RootCertStore, ServerConfig};
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::ServerTls;

    /// How long a client that is not admitted may take to close its side.
    const LAST_WORDS: Duration = Duration::from_secs(1);

    /// Who stands at the door.
    #[derive(Clone)]
    pub(crate) struct Guard(Option<TlsAcceptor>);

    /// A connection to another daemon.
    pub(crate) type Called = Admitted;

    /// Has both ends of a connection say who they are, if there is TLS.
    pub(crate) async fn call(stream: TcpStream, tls: Option<&CallerTls>) -> io::Result<Called> {
        let Some(tls) = tls else { return Ok(Admitted::Plain(stream)) };
        let (config, name) = tls.config(stream.peer_addr()?.ip());
        let stream = TlsConnector::from(config).connect(name, stream).await?;
        Ok(Admitted::Tls(Box::new(stream.into())))
    }

    /// A connection, in the clear or over TLS.
    pub(crate) enum Admitted {
        Plain(TcpStream),
        Tls(Box<TlsStream<TcpStream>>),
    }

    impl Guard {
        /// What is wrong with the files is the error.
        pub(crate) fn new(tls: Option<&ServerTls>) -> Result<Self, String> {
            let Some(tls) = tls else { return Ok(Self(None)) };
            let provider = Arc::new(ring::default_provider());
            let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
                .with_safe_default_protocol_versions()
                .map_err(|error| error.to_string())?;
            let builder = match &tls.client_authorities {
                None => builder.with_no_client_auth(),
                Some(path) => {
                    let of_file = |error| format!("{}: {error}", path.display());
                    let mut roots = RootCertStore::empty();
                    for certificate in certificates(path)? {
                        roots.add(certificate).map_err(|error| of_file(error.to_string()))?;
                    }
                    let verifier =
                        WebPkiClientVerifier::builder_with_provider(roots.into(), provider).build();
                    builder.with_client_cert_verifier(
                        verifier.map_err(|error| of_file(error.to_string()))?,
                    )
                }
            };
            let chain = certificates(&tls.certificate)?;
            let key = PrivateKeyDer::from_pem_file(&tls.key)
                .map_err(|error| format!("private key {}: {error}", tls.key.display()))?;
            let config = builder.with_single_cert(chain, key).map_err(|error| {
                format!("{} and {}: {error}", tls.certificate.display(), tls.key.display())
            })?;
            Ok(Self(Some(Arc::new(config).into())))
        }

        /// Waits until the client has proved what it must.
        pub(crate) async fn admit(&self, stream: TcpStream) -> io::Result<Admitted> {
            match &self.0 {
                None => Ok(Admitted::Plain(stream)),
                Some(acceptor) => match acceptor.accept(stream).into_fallible().await {
                    Ok(stream) => Ok(Admitted::Tls(Box::new(stream.into()))),
                    Err((error, stream)) => {
                        // Why was said. What the client still says must not take that back.
                        let _ = timeout(LAST_WORDS, drain(stream)).await;
                        Err(error)
                    }
                },
            }
        }
    }

    /// Reads to the end and throws away.
    async fn drain(mut stream: TcpStream) {
        let _ = stream.shutdown().await;
        let mut bytes = [0; 1024];
        while stream.read(&mut bytes).await.is_ok_and(|count| count > 0) {}
    }

    impl AsyncRead for Admitted {
        fn poll_read(
            self: Pin<&mut Self>,
            context: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            match self.get_mut() {
                Self::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
                Self::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
            }
        }
    }

    impl AsyncWrite for Admitted {
        fn poll_write(
            self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            match self.get_mut() {
                Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
                Self::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
            }
        }

        fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            match self.get_mut() {
                Self::Plain(stream) => Pin::new(stream).poll_flush(context),
                Self::Tls(stream) => Pin::new(stream).poll_flush(context),
            }
        }

        fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            match self.get_mut() {
                Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
                Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
            }
        }
    }
}

#[cfg(not(feature = "tls"))]
mod off {
    use std::io;

    use millstream_net::tls::CallerTls;
    use tokio::net::TcpStream;

    use super::ServerTls;

    /// A connection to another daemon.
    pub(crate) type Called = TcpStream;

    /// There is no TLS.
    pub(crate) async fn call(stream: TcpStream, _: Option<&CallerTls>) -> io::Result<Called> {
        Ok(stream)
    }

    /// Everybody is admitted.
    #[derive(Clone)]
    pub(crate) struct Guard;

    impl Guard {
        pub(crate) fn new(tls: Option<&ServerTls>) -> Result<Self, String> {
            match tls {
                None => Ok(Self),
                Some(_) => Err("this build has none".to_owned()),
            }
        }

        pub(crate) async fn admit(&self, stream: TcpStream) -> io::Result<TcpStream> {
            Ok(stream)
        }
    }
}
