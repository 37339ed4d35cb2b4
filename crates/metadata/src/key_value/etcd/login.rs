//! Who a client of etcd is: a user and a password, and the token that it gets for them
//! (<https://etcd.io/docs/v3.4/op-guide/authentication/>).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::uri::Secret;
use super::message::Authenticate;

/// See above.
pub(super) struct Login {
    user: String,
    password: Secret,
    token: Mutex<Option<Arc<str>>>,
}

impl Login {
    pub(super) fn new(user: String, password: Secret) -> Self {
        Self { user, password, token: Mutex::new(None) }
    }

    /// What is asked for a token.
    pub(super) fn request(&self) -> Authenticate<'_> {
        Authenticate { name: &self.user, password: self.password.expose() }
    }

    /// What a server says, without the password.
    pub(super) fn hide(&self, said: &str) -> String {
        said.replace(self.password.expose(), "***")
    }

    pub(super) fn token(&self) -> Option<Arc<str>> {
        self.locked().clone()
    }

    pub(super) fn keep(&self, token: Arc<str>) {
        *self.locked() = Some(token);
    }

    /// Etcd does not know this one any more: its time is over, or etcd was started anew.
    pub(super) fn forget(&self, old: &Arc<str>) {
        self.locked().take_if(|token| Arc::ptr_eq(token, old));
    }

    fn locked(&self) -> MutexGuard<'_, Option<Arc<str>>> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
