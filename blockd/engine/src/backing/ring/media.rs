//! IO on files, and commands of the engine. A partial transfer is continued where it stopped.

use blockd_media::Gate;
use io_uring::squeue::Entry;
use io_uring::{opcode, types};

use blockd_mapper::io::{IoCommand, IoOp};

use super::memory::{Address, ZEROES};
use super::{Record, Ring};
use crate::backing::operation::{Ended, FileSlot, IoDirection};
use crate::block::{Buffer, Place};

/// IO on a file that may have to go on after a short transfer.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileIo {
    pub(super) file: FileSlot,
    pub(super) direction: IoDirection,
    pub(super) offset: u64,
    /// The memory to transfer; that of the zeroes if none.
    pub(super) place: Option<Place>,
    /// First byte of it.
    pub(super) at: u32,
    pub(super) len: u32,
}

impl Ring {
    /// Starts IO between a buffer (`len` bytes from `at` on) and a file. There must be room.
    #[expect(clippy::too_many_arguments, reason = "the parts of one operation")]
    pub fn io(
        &mut self,
        token: u64,
        direction: IoDirection,
        file: FileSlot,
        offset: u64,
        buffer: &Buffer,
        at: u32,
        len: u32,
    ) -> std::io::Result<()> {
        let end = at as usize + len as usize;
        assert!(end <= Self::capacity(buffer), "an operation leaves its buffer");
        let place = Some(buffer.place());
        self.memory.begin(buffer.place());
        self.start_io(token, FileIo { file, direction, offset, place, at, len })
    }

    /// Starts to write zeroes, at most [`Self::MAX_ZEROES`] bytes. There must be room.
    pub fn write_zeroes(
        &mut self,
        token: u64,
        file: FileSlot,
        offset: u64,
        len: u32,
        dsync: bool,
    ) -> std::io::Result<()> {
        assert!(len <= ZEROES, "more zeroes than there are");
        let direction = IoDirection::Write { dsync };
        self.start_io(token, FileIo { file, direction, offset, place: None, at: 0, len })
    }

    /// Starts to fill a part of a buffer that this process can't reach with zeroes. There must be
    /// room.
    pub fn read_zeroes(
        &mut self,
        token: u64,
        buffer: &Buffer,
        at: u32,
        len: u32,
    ) -> std::io::Result<()> {
        let file = self.zero_file.ok_or_else(|| std::io::Error::other("no source of zeroes"))?;
        self.io(token, IoDirection::Read, file, 0, buffer, at, len)?;
        // It is no IO of the media.
        self.pushed_io -= 1;
        Ok(())
    }

    /// Most bytes of [`Self::write_zeroes`].
    pub const MAX_ZEROES: u32 = ZEROES;

    fn is_closed(&self, file: FileSlot) -> bool {
        self.files.gate(file).is_some_and(|gate| !gate.is_open())
    }

    pub(super) fn start_io(&mut self, token: u64, io: FileIo) -> std::io::Result<()> {
        if matches!(io.direction, IoDirection::Write { .. }) && self.is_closed(io.file) {
            self.forget(Record::Io { token, io });
            return Err(Gate::closed());
        }
        let entry = self.io_entry(io);
        self.pushed_io += 1;
        self.push(entry, Record::Io { token, io })
    }

    fn io_entry(&mut self, io: FileIo) -> Entry {
        let file = types::Fixed(io.file.0);
        let Address { start, fixed } = self.memory.address(io.place, io.at);
        match (io.direction, fixed) {
            (IoDirection::Read, Some(entry)) => {
                opcode::ReadFixed::new(file, start, io.len, entry).offset(io.offset).build()
            }
            (IoDirection::Read, None) => {
                opcode::Read::new(file, start, io.len).offset(io.offset).build()
            }
            (IoDirection::Write { dsync }, Some(entry)) => {
                let write = opcode::WriteFixed::new(file, start, io.len, entry);
                write.offset(io.offset).rw_flags(sync_flags(dsync)).build()
            }
            (IoDirection::Write { dsync }, None) => {
                let write = opcode::Write::new(file, start, io.len);
                write.offset(io.offset).rw_flags(sync_flags(dsync)).build()
            }
        }
    }

    /// Starts to make every completed write of a file durable. There must be room.
    #[inline]
    pub fn sync(&mut self, token: u64, file: FileSlot) -> std::io::Result<()> {
        self.pushed_io += 1;
        self.push(sync_entry(file), Record::Sync { token })
    }

    /// Starts a command of the engine. Fences and discards are the caller's business. A command
    /// that can't be started comes back.
    #[inline]
    pub fn command(&mut self, file: FileSlot, command: IoCommand) -> Result<(), IoCommand> {
        self.start_command(file, command, 0)
    }

    /// Makes every completed write of the file durable, in the name of a command that has been
    /// carried out otherwise. One that can't be started comes back.
    pub fn sync_command(&mut self, file: FileSlot, command: IoCommand) -> Result<(), IoCommand> {
        if self.room() == 0 {
            return Err(command);
        }
        // There is a record, so it can't fail.
        let _ = self.push(sync_entry(file), Record::Command { file, command, len: 0, moved: 0 });
        Ok(())
    }

    /// Starts a command, or what is left of it behind the bytes that have been moved.
    fn start_command(
        &mut self,
        file: FileSlot,
        mut command: IoCommand,
        moved: u32,
    ) -> Result<(), IoCommand> {
        let fixed = types::Fixed(file.0);
        let done = moved as usize;
        let (entry, len) = match &mut command.op {
            IoOp::Flush => (sync_entry(file), 0),
            IoOp::Read { offset, buffer } => {
                let bytes = &mut buffer.as_bytes_mut()[done..];
                let Ok(len) = u32::try_from(bytes.len()) else { return Err(command) };
                let read = opcode::Read::new(fixed, bytes.as_mut_ptr(), len);
                (read.offset(*offset + u64::from(moved)).build(), len)
            }
            IoOp::Write { .. } if self.is_closed(file) => return Err(command),
            IoOp::Write { offset, buffer, fua } => {
                let bytes = &buffer.as_bytes()[done..];
                let Ok(len) = u32::try_from(bytes.len()) else { return Err(command) };
                let write = opcode::Write::new(fixed, bytes.as_ptr(), len);
                let write = write.offset(*offset + u64::from(moved));
                (write.rw_flags(sync_flags(*fua)).build(), len)
            }
            IoOp::Fence | IoOp::Discard { .. } => return Err(command),
        };
        if self.room() == 0 {
            return Err(command);
        }
        // There is a record, so it can't fail.
        let _ = self.push(entry, Record::Command { file, command, len, moved });
        Ok(())
    }

    /// A short transfer goes on where it stopped: where the space below ends, the rest gets the
    /// error.
    pub(super) fn command_ended(
        &mut self,
        file: FileSlot,
        command: IoCommand,
        (len, before): (u32, u32),
        result: std::io::Result<u32>,
    ) -> Option<Ended> {
        let result = match result {
            Ok(moved) if moved == len => Ok(()),
            Ok(moved) if (1..len).contains(&moved) => {
                match self.start_command(file, command, before + moved) {
                    Ok(()) => return None,
                    Err(command) if self.is_closed(file) => {
                        return Some(Ended::Command(command, Err(Gate::closed())));
                    }
                    Err(command) => {
                        let error = std::io::Error::other("no record for the rest of a command");
                        return Some(Ended::Command(command, Err(error)));
                    }
                }
            }
            Ok(moved) => Err(std::io::Error::other(format!("{moved} of {len} bytes"))),
            Err(error) => Err(error),
        };
        Some(Ended::Command(command, result))
    }

    /// A short transfer goes on where it stopped.
    pub(super) fn io_ended(
        &mut self,
        token: u64,
        io: FileIo,
        result: std::io::Result<u32>,
    ) -> Option<Ended> {
        let result = match result {
            Ok(moved) if moved == io.len => Ok(()),
            Ok(0) => Err(std::io::Error::other("the media ended")),
            Ok(moved) if moved < io.len => {
                let rest = FileIo {
                    offset: io.offset + u64::from(moved),
                    at: io.at + moved,
                    len: io.len - moved,
                    ..io
                };
                match self.start_io(token, rest) {
                    Ok(()) => return None,
                    // `push` has let go of the memory.
                    Err(error) => return Some(Ended::Io(token, Err(error))),
                }
            }
            Ok(_) => Err(std::io::Error::other("the media moved more than was asked for")),
            Err(error) => Err(error),
        };
        if let Some(place) = io.place {
            self.memory.end(place);
        }
        Some(Ended::Io(token, result))
    }
}

fn sync_entry(file: FileSlot) -> Entry {
    opcode::Fsync::new(types::Fixed(file.0)).flags(types::FsyncFlags::DATASYNC).build()
}

const fn sync_flags(dsync: bool) -> i32 {
    if dsync { libc::RWF_DSYNC } else { 0 }
}
