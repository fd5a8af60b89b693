//! The messages in a body of gRPC, gathered from the bytes that pass.

/// Bytes of a body that are kept: the plugin's limit of a request. Later bytes are counted.
const KEPT_BYTES: usize = 4 << 20;

/// Bytes in front of a message: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// A body as it passes.
#[derive(Clone, Debug, Default)]
pub struct Body {
    bytes: Vec<u8>,
    total: u64,
}

/// The messages of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Messages {
    /// All of them.
    Whole(Vec<Vec<u8>>),
    /// Too long, compressed, or cut off: its bytes.
    Unread(u64),
}

impl Body {
    /// Adds bytes that pass.
    pub fn add(&mut self, bytes: &[u8]) {
        self.total += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let room = KEPT_BYTES.saturating_sub(self.bytes.len());
        self.bytes.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// The messages that have passed, and the bytes of all.
    #[must_use]
    pub fn messages(&self) -> Messages {
        let mut all = Vec::new();
        let mut rest = self.bytes.as_slice();
        while let Some((prefix, behind)) = rest.split_first_chunk::<PREFIX>() {
            let [compressed, length @ ..] = *prefix;
            let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
            let Some((message, next)) = behind.split_at_checked(length) else { break };
            if compressed != 0 {
                break;
            }
            all.push(message.to_vec());
            rest = next;
        }
        let is_whole = rest.is_empty() && u64::try_from(self.bytes.len()) == Ok(self.total);
        if is_whole { Messages::Whole(all) } else { Messages::Unread(self.total) }
    }

    /// Bytes that have passed.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(pieces: &[&[u8]]) -> Body {
        let mut body = Body::default();
        pieces.iter().for_each(|piece| body.add(piece));
        body
    }

    #[test]
    fn messages_are_found_wherever_the_bytes_are_cut() {
        let bytes = b"\0\0\0\0\x03abc\0\0\0\0\0\0\0\0\0\x01d";
        let expected = Messages::Whole(vec![b"abc".to_vec(), Vec::new(), b"d".to_vec()]);
        for cut in 0..=bytes.len() {
            assert_eq!(body(&[&bytes[..cut], &bytes[cut..]]).messages(), expected, "{cut}");
        }
    }

    #[test]
    fn unreadable_bodies_are_counted() {
        for bytes in [&b"\x01\0\0\0\x01a"[..], b"\0\0\0\0\x02a", b"\0\0"] {
            let length = u64::try_from(bytes.len()).unwrap();
            assert_eq!(body(&[bytes]).messages(), Messages::Unread(length));
        }
        let long = vec![0; 3 << 20];
        let head = b"\0\0\x60\0\0";
        let body = body(&[head, &long, &long]);
        assert_eq!(body.messages(), Messages::Unread((6 << 20) + 5));
        assert!(body.bytes.len() <= KEPT_BYTES);
    }
}
