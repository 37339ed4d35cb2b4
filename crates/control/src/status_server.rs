//! Pages that others read over HTTP, of a process that does something else: its metrics, above all.
//!
//! A thread of its own serves them, over TLS where that is set. Who reads shows a token where one is asked for, and
//! nothing can be changed.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{
    ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, HeaderName, HeaderValue,
    REFERRER_POLICY, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use hyper::http::uri::Authority;
use hyper::{Method, Request, Response, StatusCode};
use millstream_net::token::Token;
use thiserror::Error;
use tokio::net::TcpListener;

use crate::http::{self, Answer};
use crate::tls::{Guard, ServerTls};
use crate::{Shutdown, reader_tokens, shutdown};

/// Connections that are served at a time.
const CONNECTIONS: usize = 32;

/// What every response says. A page may load what this server has and nothing else, may not be part of
/// another one, and is what its media type says: where a name of somebody got into a page unescaped, it
/// could not run anything.
const HEADERS: [(HeaderName, HeaderValue); 4] = [
    (CACHE_CONTROL, HeaderValue::from_static("no-store")),
    (
        CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        ),
    ),
    (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
];

/// What is at a path.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Page {
    /// Its media type.
    pub content_type: &'static str,
    /// Its text.
    pub text: String,
}

/// Says what is at a path, if anything is. It must not block.
pub type Pages = dyn Fn(&str) -> Option<Page> + Send + Sync;

/// Why pages cannot be served.
#[derive(Debug, Error)]
pub enum StatusServerError {
    /// It cannot listen.
    #[error("cannot listen on {address}: {source}{}", crate::listen_advice(source))]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Its certificate or its key cannot be used.
    #[error("TLS: {0}")]
    Tls(String),
    /// A thread, or what it needs, did not start.
    #[error("cannot serve status pages: {0}")]
    Start(#[source] io::Error),
}

/// Serves pages until it is dropped.
#[derive(Debug)]
pub struct StatusServer {
    address: SocketAddr,
    shutdown: Option<Shutdown>,
    thread: Option<JoinHandle<()>>,
}

impl StatusServer {
    /// Serves these pages to everybody at this address. Port 0 takes a free one.
    pub fn start(listen: SocketAddr, pages: Arc<Pages>) -> Result<Self, StatusServerError> {
        Self::start_for(listen, pages, Vec::new(), None)
    }

    /// The same, for those who show one of these tokens, if there are any; over TLS, if that is set.
    pub fn start_for(
        listen: SocketAddr,
        pages: Arc<Pages>,
        readers: Vec<Token>,
        tls: Option<&ServerTls>,
    ) -> Result<Self, StatusServerError> {
        let guard = Guard::new(tls).map_err(StatusServerError::Tls)?;
        let failed = |source| StatusServerError::Listen { address: listen, source };
        let listener = std::net::TcpListener::bind(listen).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let (shutdown, told) = shutdown();
        let serving = move || {
            if let Err(error) =
                crate::block_on(serve(listener, guard, pages, readers, told)).and_then(|it| it)
            {
                tracing::warn!(%error, "status pages are not served any more");
            }
        };
        let thread = thread::Builder::new().name("status".to_owned()).spawn(serving);
        let thread = thread.map_err(StatusServerError::Start)?;
        tracing::info!(%address, "serving status pages");
        Ok(Self { address, shutdown: Some(shutdown), thread: Some(thread) })
    }

    /// Where it listens.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for StatusServer {
    fn drop(&mut self) {
        drop(self.shutdown.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn serve(
    listener: std::net::TcpListener,
    guard: Guard,
    pages: Arc<Pages>,
    readers: Vec<Token>,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let is_local = listener.local_addr()?.ip().is_loopback();
    let admit = move |stream| {
        let guard = guard.clone();
        async move { guard.admit(stream).await }
    };
    let readers: Arc<[Token]> = readers.into();
    let answer = move |request: Request<Incoming>| {
        let is_meant = !is_local || asks_this_machine(&request);
        let may_read = readers.is_empty() || reader_tokens::shows_one(&request, &readers);
        std::future::ready(answer(&pages, &request, is_meant, may_read))
    };
    http::serve(listener, CONNECTIONS, admit, answer, pin!(shutdown)).await;
    Ok(())
}

/// Whether a request names no host, an address, or `localhost`. A page from elsewhere in somebody's browser has
/// another name, which its owner can have lead to a loopback address: the browser would let that page read
/// what is here (DNS rebinding).
fn asks_this_machine<Body>(request: &Request<Body>) -> bool {
    let is_this = |authority: &Authority| {
        let host = authority.host();
        let address = host.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(host);
        host.eq_ignore_ascii_case("localhost") || address.parse::<IpAddr>().is_ok()
    };
    let mut headers = request.headers().get_all(HOST).iter();
    request.uri().authority().is_none_or(is_this)
        && headers.all(|it| Authority::try_from(it.as_bytes()).is_ok_and(|it| is_this(&it)))
}

fn answer(
    pages: &Arc<Pages>,
    request: &Request<Incoming>,
    is_meant: bool,
    may_read: bool,
) -> Answer {
    let mut response = match *request.method() {
        _ if !is_meant => text(
            StatusCode::MISDIRECTED_REQUEST,
            "This is served at loopback addresses: ask for an address or localhost\n",
        ),
        _ if !may_read => {
            let what = "This is for those who show a token: Authorization: Bearer TOKEN\n";
            let mut response = text(StatusCode::UNAUTHORIZED, what);
            response.headers_mut().insert(WWW_AUTHENTICATE, reader_tokens::CHALLENGE);
            response
        }
        // Of HEAD, hyper leaves out the text.
        Method::GET | Method::HEAD => match pages(request.uri().path()) {
            Some(page) => page.into_response(),
            None => text(StatusCode::NOT_FOUND, "404: Not Found\n"),
        },
        _ => {
            let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "Method not allowed\n");
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            response
        }
    };
    response.headers_mut().extend(HEADERS);
    Ok::<_, Infallible>(response)
}

impl Page {
    fn into_response(self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::new(self.text.into()));
        let content_type = HeaderValue::from_static(self.content_type);
        response.headers_mut().insert(CONTENT_TYPE, content_type);
        response
    }
}

fn text(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, plain);
    response
}
