//! Authorities, and certificates that they vouch for, in files.

use std::fs;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, date_time_ymd,
};

use super::Folder;

pub(crate) type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority(name: &str) -> Authority {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Files in PEM: those of authorities, and of certificates with their keys.
pub(crate) struct Files(Folder);

impl Files {
    pub(crate) fn new() -> Self {
        Self(Folder::new())
    }

    pub(crate) fn authority(&self, name: &str) -> (Authority, String) {
        let authority = authority(name);
        let path = self.0.file(&format!("{name}.pem"));
        fs::write(&path, authority.pem()).unwrap();
        (authority, path)
    }

    /// A certificate of a host, which is over if `expired`, and its key.
    pub(crate) fn certificate(
        &self,
        authority: &Authority,
        host: &str,
        expired: bool,
    ) -> [String; 2] {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        if expired {
            params.not_before = date_time_ymd(2001, 1, 1);
            params.not_after = date_time_ymd(2002, 1, 1);
        }
        let certificate = params.signed_by(&key, authority).unwrap();
        let write = |kind: &str, text: String| {
            let path = self.0.file(&format!("{host}-{expired}-{kind}.pem"));
            fs::write(&path, text).unwrap();
            path
        };
        [write("certificate", certificate.pem()), write("key", key.serialize_pem())]
    }
}
