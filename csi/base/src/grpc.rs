//! Codes and deadlines of calls, as gRPC writes them.

use std::time::Duration;

use tonic::Code;

/// Returns the name in the specification of gRPC.
#[must_use]
pub const fn code_name(code: Code) -> &'static str {
    code_names(code).0
}

/// Returns the name in the specification of gRPC, and that in Go's library of gRPC, which other CSI
/// drivers and sidecars use.
#[must_use]
pub const fn code_names(code: Code) -> (&'static str, &'static str) {
    match code {
        Code::Ok => ("OK", "OK"),
        Code::Cancelled => ("CANCELLED", "Canceled"),
        Code::Unknown => ("UNKNOWN", "Unknown"),
        Code::InvalidArgument => ("INVALID_ARGUMENT", "InvalidArgument"),
        Code::DeadlineExceeded => ("DEADLINE_EXCEEDED", "DeadlineExceeded"),
        Code::NotFound => ("NOT_FOUND", "NotFound"),
        Code::AlreadyExists => ("ALREADY_EXISTS", "AlreadyExists"),
        Code::PermissionDenied => ("PERMISSION_DENIED", "PermissionDenied"),
        Code::ResourceExhausted => ("RESOURCE_EXHAUSTED", "ResourceExhausted"),
        Code::FailedPrecondition => ("FAILED_PRECONDITION", "FailedPrecondition"),
        Code::Aborted => ("ABORTED", "Aborted"),
        Code::OutOfRange => ("OUT_OF_RANGE", "OutOfRange"),
        Code::Unimplemented => ("UNIMPLEMENTED", "Unimplemented"),
        Code::Internal => ("INTERNAL", "Internal"),
        Code::Unavailable => ("UNAVAILABLE", "Unavailable"),
        Code::DataLoss => ("DATA_LOSS", "DataLoss"),
        Code::Unauthenticated => ("UNAUTHENTICATED", "Unauthenticated"),
    }
}

/// Returns the code of a name in the specification of gRPC.
#[must_use]
pub fn code_of_name(name: &str) -> Option<Code> {
    (0..=16).map(Code::from_i32).find(|code| code_name(*code) == name)
}

/// Reads the header `grpc-timeout`: at most eight digits and a unit.
#[must_use]
pub fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let count: u64 = digits.parse().ok().filter(|_| digits.len() <= 8)?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_code_has_a_name_of_its_own() {
        for number in 0..=16 {
            let code = Code::from_i32(number);
            assert_eq!(code_of_name(code_name(code)), Some(code));
        }
        assert_eq!(code_of_name("Ok"), None);
    }

    #[test]
    fn deadlines_are_read_as_grpc_writes_them() {
        let read = [
            ("1H", Duration::from_secs(3600)),
            ("2M", Duration::from_secs(120)),
            ("15S", Duration::from_secs(15)),
            ("99999999m", Duration::from_millis(99_999_999)),
            ("5u", Duration::from_micros(5)),
            ("5n", Duration::from_nanos(5)),
        ];
        for (text, time) in read {
            assert_eq!(parse_timeout(text), Some(time), "{text}");
        }
        for text in ["", "S", "1", "1s", "-1S", "123456789S", "1ä", "é"] {
            assert_eq!(parse_timeout(text), None, "{text}");
        }
    }
}
