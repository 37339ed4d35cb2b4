//! Who may read over HTTP, where a token is asked for.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::Request;
use hyper::header::{AUTHORIZATION, HeaderValue};
use millstream_net::token::Token;

/// What those are told who have shown none: browsers ask people for a name and a password then.
pub(crate) const CHALLENGE: HeaderValue =
    HeaderValue::from_static("Basic realm=\"millstream\", charset=\"UTF-8\"");

/// Whether a request shows one of these tokens (RFC 6750), or has one as the password of any user (RFC 7617).
pub(crate) fn shows_one<Body>(request: &Request<Body>, tokens: &[Token]) -> bool {
    let mut headers = request.headers().get_all(AUTHORIZATION).iter();
    let (Some(header), None) = (headers.next(), headers.next()) else { return false };
    let Some(shown) = shown(header) else { return false };
    // All are looked at, each in constant time.
    tokens.iter().fold(false, |found, token| found | token.is_same(&shown))
}

fn shown(header: &HeaderValue) -> Option<Token> {
    let (scheme, value) = header.to_str().ok()?.split_once(' ')?;
    let value = value.trim();
    if scheme.eq_ignore_ascii_case("bearer") {
        return Token::new(value.as_bytes()).ok();
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = STANDARD.decode(value).ok()?;
    let colon = decoded.iter().position(|&byte| byte == b':')?;
    Token::new(&decoded[colon + 1..]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn may(headers: &[&str]) -> bool {
        let mut request = Request::builder();
        for header in headers {
            request = request.header(AUTHORIZATION, *header);
        }
        let tokens = [&b"the token of readers"[..], b"the token of others:"].map(Token::new);
        shows_one(&request.body(()).unwrap(), &tokens.map(Result::unwrap))
    }

    #[test]
    fn a_token_is_shown_as_such_or_as_a_password() {
        let basic = |text: &str| format!("Basic {}", STANDARD.encode(text));
        for header in [
            "Bearer the token of readers",
            "bearer the token of others:",
            &basic("any:the token of readers"),
            &basic(":the token of others:"),
        ] {
            assert!(may(&[header]), "{header}");
        }
        for header in [
            "Bearer the token of somebody",
            "Bearer",
            "Bearer ",
            "the token of readers",
            "Digest the token of readers",
            "Basic the token of readers",
            &basic("the token of readers"),
            &basic("the token of readers:"),
            "Bearer \u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}",
        ] {
            assert!(!may(&[header]), "{header}");
        }
        assert!(!may(&[]) && !may(&["Bearer the token of readers"; 2]));
    }
}
