//! What an engine answers its peers.

use std::net::SocketAddr;
use std::sync::Weak;

use millstream_metadata::{Frame, FrameType, HandShakeDesc, Handler, Probe, SegmentQuery};

use crate::engine::Inner;

/// Answers for an engine as long as there is one.
pub(crate) struct Answer {
    engine: Weak<Inner>,
}

impl Answer {
    pub(crate) fn new(engine: Weak<Inner>) -> Self {
        Self { engine }
    }
}

impl Handler for Answer {
    fn handle(&self, client: SocketAddr, request: Frame) -> Option<Frame> {
        let engine = self.engine.upgrade()?;
        let body = match request.frame_type {
            FrameType::Metadata => {
                if engine.store.is_local()
                    && let Err(error) = engine.publish()
                {
                    tracing::error!(%error, "peers do not see all of the memory");
                }
                // What is no query, as Mooncake's, asks for the memory.
                let query: SegmentQuery = serde_json::from_slice(&request.body).unwrap_or_default();
                let text = match query.file {
                    Some(file) => engine.store.local_file(&file),
                    None => engine.store.local_segment(),
                };
                text.map_or_else(|| b"null".to_vec(), |text| text.to_vec())
            }
            // What had no type before there were types was this.
            FrameType::Connection | FrameType::OldProtocol => {
                let reply = match HandShakeDesc::from_json(&request.body) {
                    Ok(mut handshake) => {
                        handshake.received_from(client.ip());
                        let reply = engine.handshake(&handshake);
                        if !reply.reply_msg.is_empty() {
                            tracing::warn!(%client, reason = reply.reply_msg, "handshake refused");
                        }
                        reply
                    }
                    Err(error) => {
                        // No engine says such things.
                        tracing::debug!(%client, %error, "no handshake");
                        HandShakeDesc::refusal(format!("malformed handshake: {error}"))
                    }
                };
                reply.to_json()
            }
            // The server has answered it.
            FrameType::Token => return None,
            FrameType::Notify => serde_json::to_vec(&engine.inbox.answer(&request)).ok()?,
            FrameType::Probe => {
                let (name, incarnation) = (engine.name().to_owned(), engine.incarnation());
                let (name, incarnation) = (Some(name), Some(incarnation));
                serde_json::to_vec(&Probe { status: "success".to_owned(), name, incarnation })
                    .ok()?
            }
        };
        Some(Frame::new(request.frame_type, body))
    }
}
