//! The owner of an operation in a worker's ring, and of a request in its executor, in 64 bits.
//!
//! ```text
//! slot         at 0..24, device 24..32
//! copy         job 0..32, bit 32
//! connection   job 0..16, at 16..40, bit 40
//! queue        tag 0..16, at 16..40, bits 40 and 41, step 44..46
//! ```

const COPY: u64 = 1 << 32;
const FRONT_END: u64 = 1 << 40;
const QUEUE: u64 = FRONT_END << 1;

const DEVICE_AT: u32 = 24;
const PLACE_AT: u32 = 16;
const STEP_AT: u32 = 44;

/// The owner of an operation or request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Token {
    /// A slot of the executor, of which there are far fewer than 2^24, and a device of its pool.
    Slot {
        /// The slot's place.
        at: usize,
        /// The device's index.
        device: u8,
    },
    /// A copy of an extent.
    Copy {
        /// The copy's place.
        job: usize,
    },
    /// An NBD connection.
    Connection {
        /// The connection's place.
        at: usize,
        /// The job of a request; of an operation, which one it is.
        job: u16,
    },
    /// A queue of a block device.
    Queue {
        /// The queue's place.
        at: usize,
        /// The request's tag.
        tag: u16,
        /// The command that the operation is.
        step: Step,
    },
}

/// The step of a queue's request for which a command was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// To fetch it.
    Fetch,
    /// To make its pages known to the ring.
    Register,
    /// To take them out again.
    Unregister,
}

impl Token {
    /// The token as rings and requests carry it.
    #[must_use]
    #[inline]
    pub const fn encode(self) -> u64 {
        match self {
            Self::Slot { at, device } => at as u64 | (device as u64) << DEVICE_AT,
            Self::Copy { job } => COPY | job as u64,
            Self::Connection { at, job } => FRONT_END | (at as u64) << PLACE_AT | job as u64,
            Self::Queue { at, tag, step } => {
                let step = (step as u64) << STEP_AT;
                FRONT_END | QUEUE | step | (at as u64) << PLACE_AT | tag as u64
            }
        }
    }

    /// The owner that a token names.
    #[must_use]
    #[inline]
    pub const fn decode(token: u64) -> Self {
        let low = (token & 0xffff) as u16;
        let at = ((token & (FRONT_END - 1)) >> PLACE_AT) as usize;
        if token & QUEUE != 0 {
            let step = match (token >> STEP_AT) & 3 {
                0 => Step::Fetch,
                1 => Step::Register,
                _ => Step::Unregister,
            };
            Self::Queue { at, tag: low, step }
        } else if token & FRONT_END != 0 {
            Self::Connection { at, job: low }
        } else if token & COPY != 0 {
            Self::Copy { job: (token & (COPY - 1)) as usize }
        } else {
            let at = (token & ((1 << DEVICE_AT) - 1)) as usize;
            Self::Slot { at, device: ((token >> DEVICE_AT) & 0xff) as u8 }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_decoded_as_it_was_encoded() {
        for token in [
            Token::Slot { at: 0, device: 0 },
            Token::Slot { at: (1 << 24) - 1, device: 255 },
            Token::Copy { job: 0 },
            Token::Copy { job: (1 << 32) - 1 },
            Token::Connection { at: 0, job: 0 },
            Token::Connection { at: (1 << 24) - 1, job: u16::MAX },
            Token::Queue { at: 0, tag: 0, step: Step::Fetch },
            Token::Queue { at: 7, tag: 4095, step: Step::Register },
            Token::Queue { at: 1 << 20, tag: 9, step: Step::Unregister },
            Token::Queue { at: (1 << 24) - 1, tag: u16::MAX, step: Step::Unregister },
        ] {
            assert_eq!(Token::decode(token.encode()), token);
        }
    }

    #[test]
    fn each_part_of_a_token_has_its_place() {
        assert_eq!(Token::Slot { at: 5, device: 3 }.encode(), 0x0300_0005);
        assert_eq!(Token::Copy { job: 7 }.encode(), 0x1_0000_0007);
        assert_eq!(Token::Connection { at: 0x12, job: 0x3456 }.encode(), 0x100_0012_3456);
        let queue = Token::Queue { at: 0x12, tag: 0x3456, step: Step::Unregister };
        assert_eq!(queue.encode(), 0x2300_0012_3456);
    }
}
