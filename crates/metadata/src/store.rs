//! Where descriptors are published and looked up.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use thiserror::Error;

use crate::client::CallErrorKind;
use crate::{
    CallError, Client, DEFAULT_FRAME_LIMIT, DescriptorError, FileName, Frame, FrameType, HostPort,
    KeyValueError, NVMEOF, NameError, SegmentDesc, SegmentQuery,
};

/// The name of [`PeerToPeer`] where a metadata server is expected.
pub const P2P_HANDSHAKE: &str = "P2PHANDSHAKE";

/// Where a named engine answers handshakes: `mooncake/rpc_meta/<name>` in a store.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RpcMeta {
    /// Host name or address, and port.
    pub address: HostPort,
    /// Which start of its process wrote it, as in the descriptor; Mooncake does not say.
    pub incarnation: Option<u64>,
}

/// Why a store could not do what was asked.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The name is none that this store can look up.
    #[error("segment name {0}")]
    Name(#[from] NameError),
    /// There is no such segment.
    #[error("there is no segment {name:?} in {store}")]
    NotFound {
        /// What was asked for.
        name: String,
        /// Where.
        store: String,
    },
    /// The peer or the store could not be asked.
    #[error(transparent)]
    Call(#[from] CallError),
    /// What is stored there is no valid descriptor.
    #[error("{origin}: {error}")]
    Descriptor {
        /// Where it came from.
        origin: String,
        /// What is wrong with it.
        error: DescriptorError,
    },
    /// The descriptor is too long for the store, or for a peer to accept.
    #[error(
        "the descriptor of segment {name:?} takes {length} bytes, more than the {limit} that a peer or \
         the metadata server takes: register fewer pieces of memory, and longer ones"
    )]
    TooLong {
        /// The segment.
        name: String,
        /// Bytes of its JSON.
        length: usize,
        /// The most that fit.
        limit: usize,
    },
    /// No segment can be called so in a store.
    #[error("segment name {name:?}: {what}")]
    BadName {
        /// The name, shortened.
        name: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The server failed.
    #[error(transparent)]
    Server(#[from] KeyValueError),
    /// Another engine has the name.
    #[error(
        "segment name {name:?} is taken: {store} has it for the engine at {holder}, which {sign}; choose \
         another name, or end that engine"
    )]
    Taken {
        /// The name.
        name: String,
        /// Where it is taken.
        store: String,
        /// Where the other engine answers.
        holder: HostPort,
        /// How it is known to be there.
        sign: &'static str,
    },
    /// One call failed for several callers.
    #[error(transparent)]
    Shared(Arc<Self>),
}

impl StoreError {
    /// Whether the same call may succeed later, with nothing changed but the server.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Server(error) => error.is_transient(),
            Self::Shared(error) => error.is_transient(),
            _ => false,
        }
    }
}

/// Publishes and looks up descriptors and addresses. Calls may block, up to the store's deadline.
pub trait Store: Send + Sync + 'static {
    /// Publishes a descriptor of this engine, its own or a file's ([`FileName`]), in place of the one
    /// before.
    fn publish_segment(&self, descriptor: &SegmentDesc) -> Result<(), StoreError>;

    /// As [`Store::publish_segment`], but does not wait: it is published when the store can be reached.
    fn publish_segment_later(&self, descriptor: &SegmentDesc) {
        if let Err(error) = self.publish_segment(descriptor) {
            tracing::error!(%error, "the descriptor is not published");
        }
    }

    /// Takes a descriptor of this engine back.
    fn withdraw_segment(&self, name: &str) -> Result<(), StoreError>;

    /// The descriptor of a segment, as it is now.
    fn segment(&self, name: &str) -> Result<SegmentDesc, StoreError>;

    /// Publishes where this engine answers. Before that, nobody else may have its name.
    fn publish_address(&self, name: &str, meta: &RpcMeta) -> Result<(), StoreError>;

    /// Takes that back.
    fn withdraw_address(&self, name: &str) -> Result<(), StoreError>;

    /// Where an engine answers.
    fn address(&self, name: &str) -> Result<RpcMeta, StoreError>;

    /// Where this start of an engine answers, if that is known without a question. Does not block.
    fn known_address(&self, _name: &str, _incarnation: Option<u64>) -> Option<RpcMeta> {
        None
    }

    /// The JSON text of this engine's descriptor, for peers that ask this process for it; `None`
    /// when they must ask the store.
    fn local_segment(&self) -> Option<Arc<[u8]>>;

    /// As [`Store::local_segment`], of a file of this engine.
    fn local_file(&self, _file: &str) -> Option<Arc<[u8]>> {
        None
    }

    /// Whether nobody sees the descriptor but by [`Store::local_segment`]. Then it need not be published
    /// before a peer asks for it.
    fn is_local(&self) -> bool {
        false
    }

    /// The longest descriptor that can be published, in bytes of its JSON.
    fn segment_limit(&self) -> usize;
}

/// No server: a segment's name is where its process answers, and the process is asked. The name of a
/// file has that in it ([`FileName`]).
#[derive(Debug, Default)]
pub struct PeerToPeer {
    client: Client,
    local: RwLock<Option<Arc<[u8]>>>,
    /// By the names of the files.
    files: RwLock<HashMap<String, Arc<[u8]>>>,
}

impl PeerToPeer {
    /// A store that asks with this client.
    pub fn new(client: Client) -> Self {
        Self { client, local: RwLock::default(), files: RwLock::default() }
    }

    fn set_local(&self, descriptor: Option<Arc<[u8]>>) {
        *self.local.write().unwrap_or_else(PoisonError::into_inner) = descriptor;
    }

    /// The descriptor that the peer has for what is asked.
    fn ask(&self, peer: HostPort, query: Vec<u8>) -> Result<SegmentDesc, StoreError> {
        let reply = self.client.call(&peer, &Frame::new(FrameType::Metadata, query))?;
        let trimmed = reply.body.trim_ascii();
        if trimmed.is_empty() || trimmed == b"null" || trimmed == b"{}" {
            let kind = CallErrorKind::Meaning("it has no such segment to offer".to_owned());
            return Err(CallError { peer, kind }.into());
        }
        // Its own name may differ from the one asked for: a host has several.
        SegmentDesc::from_json(&reply.body)
            .map_err(|error| StoreError::Descriptor { origin: format!("peer {peer}"), error })
    }

    fn file(&self, name: FileName) -> Result<SegmentDesc, StoreError> {
        let query = SegmentQuery { file: Some(name.file) };
        let text = serde_json::to_vec(&query).unwrap_or_default();
        let peer = name.server.clone();
        let descriptor = self.ask(name.server, text)?;
        // Who knows of no files, as Mooncake, answers with its memory.
        let own: Option<FileName> = descriptor.name.parse().ok();
        if descriptor.protocol == NVMEOF && own.is_some_and(|own| Some(own.file) == query.file) {
            return Ok(descriptor);
        }
        let kind = CallErrorKind::Meaning("it offers no files".to_owned());
        Err(CallError { peer, kind }.into())
    }
}

impl Store for PeerToPeer {
    fn publish_segment(&self, descriptor: &SegmentDesc) -> Result<(), StoreError> {
        let text = descriptor.to_json();
        let limit = self.segment_limit();
        if text.len() > limit {
            let (name, length) = (descriptor.name.clone(), text.len());
            return Err(StoreError::TooLong { name, length, limit });
        }
        match descriptor.name.parse::<FileName>() {
            Ok(name) => {
                let mut files = self.files.write().unwrap_or_else(PoisonError::into_inner);
                files.insert(name.file, text.into());
            }
            Err(_) => self.set_local(Some(text.into())),
        }
        Ok(())
    }

    fn withdraw_segment(&self, name: &str) -> Result<(), StoreError> {
        match name.parse::<FileName>() {
            Ok(name) => {
                let mut files = self.files.write().unwrap_or_else(PoisonError::into_inner);
                files.remove(&name.file);
            }
            Err(_) => self.set_local(None),
        }
        Ok(())
    }

    fn segment(&self, name: &str) -> Result<SegmentDesc, StoreError> {
        if name.starts_with(FileName::PREFIX) {
            return self.file(name.parse()?);
        }
        // The request carries the caller's own descriptor, which peers ignore today: not one that they
        // may refuse for its length.
        let own = self.local_segment().filter(|text| text.len() < DEFAULT_FRAME_LIMIT);
        let own = own.map_or_else(|| b"{}".to_vec(), |text| text.to_vec());
        self.ask(name.parse()?, own)
    }

    fn publish_address(&self, _name: &str, _meta: &RpcMeta) -> Result<(), StoreError> {
        Ok(())
    }

    fn withdraw_address(&self, _name: &str) -> Result<(), StoreError> {
        Ok(())
    }

    fn address(&self, name: &str) -> Result<RpcMeta, StoreError> {
        Ok(RpcMeta { address: name.parse()?, incarnation: None })
    }

    fn known_address(&self, name: &str, _incarnation: Option<u64>) -> Option<RpcMeta> {
        self.address(name).ok()
    }

    fn local_segment(&self) -> Option<Arc<[u8]>> {
        self.local.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn local_file(&self, file: &str) -> Option<Arc<[u8]>> {
        self.files.read().unwrap_or_else(PoisonError::into_inner).get(file).cloned()
    }

    fn is_local(&self) -> bool {
        true
    }

    fn segment_limit(&self) -> usize {
        // The type byte counts too.
        self.client.config().frame_limit.saturating_sub(1)
    }
}
