//! What switches and hosts of collectives prove to the controller, and it to them: a token, certificates.

use std::env;
use std::path::PathBuf;

use clap::Args;
use millstream_net::tls::{CallerFiles, CallerTls};
use millstream_net::token::Token;

/// The variable that names the file of the token, where no argument does.
pub(crate) const VARIABLE: &str = "INCCL_TOKEN_FILE";

/// Where it is.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Proofs {
    /// File with the token that this process and the controller prove to each other [default: what
    /// INCCL_TOKEN_FILE names, or no token]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Speak TLS with the controller, whose certificate is for the host in --controller and comes from one of these
    /// authorities, in PEM
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// The certificate of this process, for a controller that asks for one, in PEM
    #[arg(long, value_name = "FILE", requires_all = ["tls_ca", "tls_key"])]
    tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

impl Proofs {
    /// Reads the token, if there is one.
    pub(crate) fn token(&self) -> anyhow::Result<Option<Token>> {
        let named = || env::var_os(VARIABLE).filter(|name| !name.is_empty()).map(PathBuf::from);
        let file = self.token_file.clone().or_else(named);
        Ok(file.map(|file| Token::from_file(&file)).transpose()?)
    }

    /// Reads the certificates, if there is TLS. Controllers are HOST:PORT,...; a name is that of all of them.
    pub(crate) fn tls(&self, controllers: &str) -> anyhow::Result<Option<CallerTls>> {
        let Some(authorities) = self.tls_ca.clone() else { return Ok(None) };
        let own = self.tls_cert.clone().zip(self.tls_key.clone());
        let controller = controllers.split(',').next().unwrap_or_default();
        let host = controller.rsplit_once(':').map_or(controller, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        Ok(Some(CallerTls::from_files(&CallerFiles { authorities, own }, host)?))
    }
}
