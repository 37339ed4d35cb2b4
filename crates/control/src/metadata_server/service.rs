//! What a metadata server answers: the requests and the texts of Mooncake's.

use std::convert::Infallible;
use std::time::Duration;

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use tokio::time::timeout;

use super::Limits;
use super::table::{Outcome, Table};

/// The only path.
const PATH: &str = "/metadata";

/// How long the value of a request may take to come.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Answers one request.
pub(super) async fn answer(
    table: Table,
    limits: Limits,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (status, body) = respond(&table, &limits, request).await;
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

type Reply = (StatusCode, Bytes);

fn text(status: StatusCode, text: impl Into<Bytes>) -> Reply {
    (status, text.into())
}

async fn respond(table: &Table, limits: &Limits, request: Request<Incoming>) -> Reply {
    if request.uri().path() != PATH {
        return text(StatusCode::NOT_FOUND, "404: Not Found");
    }
    let key = match key(request.uri().query().unwrap_or_default()) {
        Some(key) if key.len() > limits.key_length => {
            return text(StatusCode::BAD_REQUEST, "metadata key is too long");
        }
        Some(key) => key,
        None => return text(StatusCode::BAD_REQUEST, "metadata key is required"),
    };
    match *request.method() {
        Method::GET => match table.get(&key) {
            Some(value) => (StatusCode::OK, value),
            None => text(StatusCode::NOT_FOUND, "metadata not found"),
        },
        Method::PUT => match value(request, limits.value_length).await {
            Ok(value) => reply(table.change(key, Some(value)).await, "metadata updated"),
            Err(reply) => reply,
        },
        Method::DELETE => reply(table.change(key, None).await, "metadata deleted"),
        _ => text(StatusCode::METHOD_NOT_ALLOWED, "Method not allowed"),
    }
}

fn reply(outcome: Outcome, done: &'static str) -> Reply {
    match outcome {
        Outcome::Done => text(StatusCode::OK, done),
        Outcome::Unchanged => text(StatusCode::OK, "metadata unchanged"),
        Outcome::Duplicate => text(StatusCode::BAD_REQUEST, "Duplicate rpc_meta key not allowed"),
        Outcome::NotFound => text(StatusCode::NOT_FOUND, "metadata not found"),
        Outcome::Full(what) => text(StatusCode::INSUFFICIENT_STORAGE, what),
        Outcome::Failed(what) => {
            text(StatusCode::INTERNAL_SERVER_ERROR, format!("the entry is not stored: {what}"))
        }
    }
}

/// The value that is to be put.
async fn value(request: Request<Incoming>, limit: usize) -> Result<Bytes, Reply> {
    let too_long = || {
        let what = format!("metadata value is longer than {limit} bytes");
        text(StatusCode::PAYLOAD_TOO_LARGE, what)
    };
    if request.body().size_hint().lower() > limit as u64 {
        return Err(too_long());
    }
    let body = Limited::new(request.into_body(), limit);
    match timeout(BODY_TIMEOUT, body.collect()).await {
        // A copy: the bytes are a part of the connection's buffer, which would live as long.
        Ok(Ok(body)) => Ok(Bytes::copy_from_slice(&body.to_bytes())),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_long()),
        Ok(Err(error)) => Err(text(StatusCode::BAD_REQUEST, error.to_string())),
        Err(_) => Err(text(StatusCode::REQUEST_TIMEOUT, "metadata value did not come in time")),
    }
}

/// The key in a query. `None` where there is none.
fn key(query: &str) -> Option<String> {
    let key = query.split('&').find_map(|pair| pair.strip_prefix("key="))?;
    let key = String::from_utf8_lossy(&unescaped(key)).trim().to_owned();
    (!key.is_empty()).then_some(key)
}

/// Bytes that a query has as `%` and two hexadecimal digits, or as they are. A plus is a space.
fn unescaped(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut unescaped = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let digits = bytes.get(at + 1..at + 3).and_then(|digits| std::str::from_utf8(digits).ok());
        let digits = digits.filter(|it| it.bytes().all(|digit| digit.is_ascii_hexdigit()));
        match (byte, digits.and_then(|digits| u8::from_str_radix(digits, 16).ok())) {
            (b'%', Some(escaped)) => {
                unescaped.push(escaped);
                at += 3;
                continue;
            }
            (b'+', _) => unescaped.push(b' '),
            _ => unescaped.push(byte),
        }
        at += 1;
    }
    unescaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_queries() {
        for (query, found) in [
            ("key=mooncake%2Fram%2Fa%3A1", Some("mooncake/ram/a:1")),
            ("key=mooncake/ram/a:1", Some("mooncake/ram/a:1")),
            ("x=1&key=a+b%20c&key=d", Some("a b c")),
            ("key=%", Some("%")),
            ("key=%2", Some("%2")),
            ("key=%+1", Some("% 1")),
            ("key=%ff", Some("\u{fffd}")),
            ("key=", None),
            ("key=%20", None),
            ("", None),
            ("keys=a", None),
        ] {
            assert_eq!(key(query).as_deref(), found, "{query}");
        }
    }
}
