//! How engines find each other: segment descriptors, the connection handshake, the framed
//! request-and-reply protocol that carries them, and the stores that hold descriptors.
//!
//! Formats and names are Mooncake's, so that its processes can be peers: JSON objects whose
//! unknown keys are ignored and whose missing keys have defaults, in frames of a 64-bit
//! little-endian length, a type byte, and the JSON text, one request per TCP connection.
//!
//! - [`SegmentDesc`]: what a segment offers (devices, buffers, keys).
//! - [`HandShakeDesc`]: what two engines tell each other to connect queue pairs.
//! - [`FrameDecoder`]: the frame parser, without I/O.
//! - [`Client`] and [`Server`]: blocking TCP, every call with a deadline.
//! - [`Caller`]: many calls at once on one thread, which tells how they end.
//! - [`Acceptor`]: the socket below a server, with a limit on strangers.
//! - [`Token`]: a secret that engines share; [`Gate`] admits those to a port who prove that they have it.
//! - [`PeerTls`]: TLS between engines.
//! - [`Store`]: where descriptors are published and looked up; [`PeerToPeer`] asks the segment's
//!   own process (`P2PHANDSHAKE`).
//! - [`open_store`]: the store with a URI.
//! - [`KeyValueStore`]: a store on a server that keeps values by keys ([`KeyValue`]).
//! - [`EtcdTransactions`]: leases and transactions of an etcd, for processes of which one leads.

#![forbid(unsafe_code)]

mod acceptor;
mod caller;
mod client;
mod exchange;
mod frame;
mod gate;
mod gid;
mod handshake;
mod key_value;
mod key_value_store;
mod limits;
mod message;
mod name;
mod open;
mod peer_tls;
mod protocols;
mod resolver;
mod segment;
mod server;
mod store;
mod stream;
mod timestamp;
mod token;

pub use acceptor::{Acceptor, AcceptorConfig, Connection};
pub use caller::{Caller, DEFAULT_CALL_LIMIT};
pub use client::{CallError, CallErrorKind, Client, ClientConfig};
pub use frame::{DEFAULT_FRAME_LIMIT, Frame, FrameDecoder, FrameError, FrameType};
pub use gate::{Gate, ProofError, prove};
pub use gid::{Gid, GidError};
pub use handshake::{HandShakeDesc, RelayedDesc};
pub use key_value::http::HttpKeyValue;
pub use key_value::{
    Etcd, EtcdEntry, EtcdOperation, EtcdOutcome, EtcdTransactions, KeyValue, KeyValueConfig,
    KeyValueError, KeyValueErrorKind, LeaderKey, Memcached, REFRESH_INTERVAL, Redis, RedisLogin,
    Secret, TIME_TO_LIVE, TlsFiles, UriError,
};
pub use key_value_store::{KeyValueStore, KeyValueStoreConfig};
pub use message::{Notify, Probe, SegmentQuery};
pub use name::{DEFAULT_HANDSHAKE_PORT, FileName, HostPort, NameError, NicPath};
pub use open::{OpenStoreError, OpenStoreErrorKind, is_peer_to_peer, open_store, without_password};
pub use peer_tls::{PeerTls, TlsError, TlsSession, begins_tls};
pub use resolver::{Addresses, Answer, Resolution, Resolver, Ticket};
pub use segment::{
    BufferDesc, DescriptorError, DeviceDesc, FileKey, FileTargetDesc, MAX_BUFFERS, MAX_DEVICES,
    NVMEOF, PriorityMatrix, SegmentDesc, SharedMemoryDesc, WholeDesc,
};
pub use server::{Handler, Server, ServerConfig};
pub use store::{P2P_HANDSHAKE, PeerToPeer, RpcMeta, Store, StoreError};
pub use timestamp::timestamp;
pub use token::{
    Initiator, MESSAGE_LIMIT, Purpose, Token, TokenError, TokenFileError, token_refusal,
};
