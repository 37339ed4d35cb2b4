//! Certificates of engines, made for tests.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use millstream_metadata::{PeerTls, TlsFiles};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, date_time_ymd,
};

/// Someone whose certificates a folder has.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: PathBuf,
    count: AtomicUsize,
}

impl Drop for Authority {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = format!("millstream-peer-tls-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        fs::create_dir_all(&folder).unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        fs::write(folder.join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, folder, count: AtomicUsize::new(0) }
    }

    pub(crate) fn certificates(&self) -> PathBuf {
        self.folder.join("ca.pem")
    }

    /// What somebody has TLS by whose certificate is for this name until that year, and who trusts these authorities.
    pub(crate) fn identity(&self, name: &str, last_year: i32, trusted: &Path) -> PeerTls {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_after = date_time_ymd(last_year, 1, 1);
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let file = |what: &str, text: &str| {
            let path = self.folder.join(format!("{number}-{what}.pem"));
            fs::write(&path, text).unwrap();
            Some(path)
        };
        let files = TlsFiles {
            authorities: Some(trusted.to_owned()),
            certificate: file("certificate", &params.signed_by(&key, &self.issuer).unwrap().pem()),
            key: file("key", &key.serialize_pem()),
        };
        PeerTls::from_files(&files).unwrap()
    }

    pub(crate) fn good(&self, host: IpAddr) -> PeerTls {
        self.identity(&host.to_string(), 4000, &self.certificates())
    }
}
