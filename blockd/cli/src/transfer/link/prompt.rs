//! A buffer whose content does not stay in it for long.

use std::io::{self, BufWriter, Write};
use std::time::Duration;

use blockd_media::clock::Clock;

/// Records gather in a buffer of this size: a head has only 24 bytes.
const BUFFER_BYTES: usize = 256 << 10;

/// How long they may: a receiver takes a sender for gone of which it gets nothing for a minute, and
/// the records of a volume full of zeroes take hours to fill the buffer.
const GATHERING: Duration = Duration::from_secs(10);

/// Passes on what is written in large pieces, or after 10 s.
#[derive(Debug)]
pub(crate) struct Prompt<W: Write> {
    out: BufWriter<W>,
    limit: Duration,
    /// Since what was written last was passed on.
    clock: Clock,
}

impl<W: Write> Prompt<W> {
    pub(crate) fn new(out: W) -> Self {
        let out = BufWriter::with_capacity(BUFFER_BYTES, out);
        Self { out, limit: GATHERING, clock: Clock::start() }
    }
}

impl<W: Write> Write for Prompt<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let count = self.out.write(data)?;
        if self.clock.elapsed() >= self.limit {
            self.flush()?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.clock = Clock::start();
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_gathers_for_a_while_only() {
        let mut bytes = Vec::new();
        let mut prompt = Prompt { limit: Duration::MAX, ..Prompt::new(&mut bytes) };
        prompt.write_all(&[1; 24]).unwrap();
        assert_eq!(prompt.out.get_ref().len(), 0);
        prompt.limit = Duration::ZERO;
        prompt.write_all(&[2; 24]).unwrap();
        assert_eq!(prompt.out.get_ref().len(), 48);
    }
}
