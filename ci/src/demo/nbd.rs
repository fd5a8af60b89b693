//! A minimal NBD client that writes some blocks of a volume.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// An answer that takes longer does not come.
const LIMIT: Duration = Duration::from_secs(30);

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;

/// A connection to a volume.
pub(super) struct Client(UnixStream);

impl Client {
    /// Connects by `NBD_OPT_EXPORT_NAME`, the shortest way.
    ///
    /// # Errors
    /// When the daemon does not answer as it should.
    pub(super) fn connect(socket: &Path, volume: &str) -> Result<Self> {
        let mut stream = UnixStream::connect(socket)
            .with_context(|| format!("connecting to {}", socket.display()))?;
        stream.set_read_timeout(Some(LIMIT))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        ensure!(greeting[..16] == *b"NBDMAGICIHAVEOPT", "it is no NBD server");
        // Fixed newstyle, no zeroes; then the one option.
        let mut said = 3_u32.to_be_bytes().to_vec();
        said.extend_from_slice(b"IHAVEOPT");
        said.extend_from_slice(&1_u32.to_be_bytes());
        said.extend_from_slice(&u32::try_from(volume.len())?.to_be_bytes());
        said.extend_from_slice(volume.as_bytes());
        stream.write_all(&said)?;
        let mut size_and_flags = [0; 10];
        stream.read_exact(&mut size_and_flags).context("the volume is not served")?;
        Ok(Self(stream))
    }

    /// Writes some whole blocks.
    ///
    /// # Errors
    /// When the daemon refuses.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        self.ask(WRITE, offset, data)
    }

    /// Makes everything durable, and ends the connection.
    ///
    /// # Errors
    /// When the daemon refuses.
    pub(super) fn finish(mut self) -> Result<()> {
        self.ask(FLUSH, 0, &[])?;
        self.0.write_all(&request(DISCONNECT, 0, 0))?;
        // The daemon closes it once it is done.
        let rest = self.0.read(&mut [0])?;
        ensure!(rest == 0, "an answer to a goodbye");
        Ok(())
    }

    fn ask(&mut self, command: u16, offset: u64, data: &[u8]) -> Result<()> {
        self.0.write_all(&request(command, offset, u32::try_from(data.len())?))?;
        self.0.write_all(data)?;
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply)?;
        ensure!(reply[..4] == REPLY_MAGIC.to_be_bytes(), "an answer that is none");
        ensure!(reply[4..8] == [0; 4], "refused with error {}", reply[7]);
        Ok(())
    }
}

fn request(command: u16, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&[0; 2]);
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&[0; 8]);
    bytes.extend_from_slice(&offset.to_be_bytes());
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes
}
