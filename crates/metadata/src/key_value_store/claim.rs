//! Names: an engine has its own, unless a live one has it already.
//!
//! Servers cannot compare and put. So of two engines that claim a name at the same moment, the one that
//! wrote first may find out only when it looks after its entry the next time.

use std::io;

use super::own::Entry;
use super::{Shared, names};
use crate::client::CallErrorKind;
use crate::{
    Frame, FrameType, KeyValue, KeyValueError, KeyValueErrorKind, Probe, RpcMeta, StoreError,
    TlsError, TokenError,
};

/// How often a claim is tried when others are at the same entry.
const ATTEMPTS: u32 = 4;

impl<K: KeyValue> Shared<K> {
    /// Makes the entry of a name lead to this engine.
    pub(super) fn claim(&self, key: &str, own: &RpcMeta, entry: &Entry) -> Result<(), StoreError> {
        let mut refusal = None;
        for _ in 0..ATTEMPTS {
            if let Some(now) = self.server.get(key)? {
                if *now == *entry.wanted && entry.written.is_some() && self.server.refresh(key)? {
                    return Ok(());
                }
                self.check_free(&entry.name, own, &now)?;
                // The original's server does not let an address be written over.
                self.server.remove(key)?;
            }
            match self.server.put(key, &entry.wanted) {
                Ok(()) => {}
                // Somebody was faster.
                Err(error) if is_duplicate(&error) => {
                    refusal = Some(error);
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            // Others may have written at the same time.
            if self.server.get(key)?.is_some_and(|now| *now == *entry.wanted) {
                return Ok(());
            }
        }
        Err(match refusal {
            Some(error) => error.into(),
            None => {
                let kind = KeyValueErrorKind::Meaning(
                    "what was put there is not there: do others write it, too?".to_owned(),
                );
                KeyValueError { uri: self.server.uri().to_owned(), key: key.to_owned(), kind }
                    .into()
            }
        })
    }

    /// Whether an entry leads to nobody, or to this engine or one that had its address before.
    fn check_free(&self, name: &str, own: &RpcMeta, now: &[u8]) -> Result<(), StoreError> {
        let store = self.server.uri();
        let holder = match names::read_address(now) {
            Ok(holder) if holder.address == own.address => return Ok(()),
            Ok(holder) => holder,
            Err(what) => {
                tracing::warn!(name, store, what, "an address that is none is replaced");
                return Ok(());
            }
        };
        match self.sign_of_life(name, own, &holder) {
            Some(sign) => {
                let (name, store) = (name.to_owned(), store.to_owned());
                Err(StoreError::Taken { name, store, holder: holder.address, sign })
            }
            None => {
                let holder = holder.address;
                tracing::warn!(name, store, %holder, "the address of an engine that is gone is replaced");
                Ok(())
            }
        }
    }

    /// How it shows that a name's holder is there, if it is.
    fn sign_of_life(&self, name: &str, own: &RpcMeta, holder: &RpcMeta) -> Option<&'static str> {
        let probe = Frame::new(FrameType::Probe, b"{}".to_vec());
        let reply = match self.client.call(&holder.address, &probe) {
            Ok(reply) => reply,
            Err(error) => {
                return match error.kind {
                    CallErrorKind::NoReply { .. } => Some("accepts connections but gives no reply"),
                    // As the original does that knows no probes.
                    CallErrorKind::Closed => Some("accepts connections"),
                    CallErrorKind::Tls(TlsError::NoTls)
                    | CallErrorKind::Token(TokenError::TlsNeeded) => {
                        Some("asks for a certificate and we have none, or the reverse")
                    }
                    CallErrorKind::Tls(_) => Some("answers, and there is no TLS with it"),
                    CallErrorKind::Token(_) => Some("has another token than ours, or none"),
                    // It may live: only we cannot ask.
                    CallErrorKind::Resolve(error) if !is_no_host(&error) => {
                        Some("cannot be looked for, since no name server answers here")
                    }
                    _ => None,
                };
            }
        };
        let probe: Probe = serde_json::from_slice(&reply.body).unwrap_or_default();
        // Its port may be another engine's by now, or ours, seen from elsewhere.
        let is_other = probe.name.is_some_and(|answering| answering != name);
        let is_own = probe.incarnation.is_some() && probe.incarnation == own.incarnation;
        (!is_other && !is_own).then_some("answers there")
    }
}

/// Whether a name server has said that there is no host of a name, rather than nothing.
fn is_no_host(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}

/// Whether the server does not let an entry be written over.
fn is_duplicate(error: &KeyValueError) -> bool {
    matches!(error.kind, KeyValueErrorKind::Refused { status: Some(400), .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Its machine may be up and its name taken: who has no name server does not know.
    #[test]
    fn only_a_host_that_is_known_not_to_be_there_is_gone() {
        let text = "any, as it is in the locale of the program";
        for (kind, is_gone) in [
            (io::ErrorKind::NotFound, true),
            (io::ErrorKind::Other, false),
            (io::ErrorKind::TimedOut, false),
        ] {
            assert_eq!(is_no_host(&io::Error::new(kind, text)), is_gone, "{kind}");
        }
    }
}
