//! Names in paths.

/// A segment of a path with its percent encoding taken off (RFC 3986, section 2.1); `None` when that is no
/// text, or it is more than one segment.
pub(super) fn decoded(segment: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(segment.len());
    let mut rest = segment.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'/' => return None,
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                (digit()? << 4 | digit()?) as u8
            }
            other => other,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::decoded;

    #[test]
    fn names_are_what_was_encoded() {
        for (segment, name) in [
            ("g", Some("g")),
            ("a%20b%2fc", Some("a b/c")),
            ("%C3%bC", Some("\u{fc}")),
            ("100%25", Some("100%")),
            ("", Some("")),
            ("a/b", None),
            ("%", None),
            ("%1", None),
            ("%zz", None),
            ("%+1", None),
            ("%ff", None),
        ] {
            assert_eq!(decoded(segment).as_deref(), name, "{segment}");
        }
    }
}
