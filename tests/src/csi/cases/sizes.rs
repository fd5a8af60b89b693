//! CreateVolume: sizes, the rows T1 to T33.

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::{
    ControllerGetVolumeRequest, CreateVolumeRequest, GetCapacityRequest, VolumeCapability,
};
use tonic::Code;

use crate::csi::case::Need::Rows;
use crate::csi::case::{CAPACITY, CREATE, GET, LIST, cases};
use crate::csi::cx::{Cx, block, mounted_as, range, refused, refused_as, says};

/// Volumes are whole numbers of the largest logical block there is, or of less.
const LARGEST_BLOCK: i64 = 4096;
const MIB: i64 = 1 << 20;
/// Bytes of a volume that is created without a size.
const DEFAULT_SIZE: i64 = 1024 * MIB;

cases! { [CREATE]
    a_volume_is_as_large_as_required;
    a_negative_size_is_invalid_argument;
    a_negative_size_is_named_with_its_value: Rows;
    required_above_the_limit_is_refused;
    without_a_range_a_volume_has_a_size;
    the_default_is_one_gibibyte: Rows;
    a_limit_below_the_default_is_the_size: Rows;
    a_limit_of_less_than_a_block_is_refused: Rows;
    required_equal_to_the_limit_is_exactly_that;
    a_size_that_cannot_be_exact_is_out_of_range: Rows;
    an_odd_size_is_rounded_up_to_a_block: Rows;
    a_size_of_37_mib_is_38797312_bytes_everywhere: Rows, LIST, GET;
    below_the_minimum_is_rounded_up: Rows;
    below_the_minimum_and_limited_is_out_of_range: Rows;
    a_size_that_overflows_is_refused;
    more_than_there_is_is_refused_with_both_numbers: Rows, CAPACITY;
    sizes_around_each_step_are_kept: Rows;
}

fn a_volume_is_as_large_as_required(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let (has, asked) = (volume.capacity_bytes, cx.options.size);
    // 0 is "not known".
    ensure!(has == 0 || has >= asked, "{has} bytes of {asked}");
    Ok(())
}

/// Row: T6.
fn a_negative_size_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    for (required, limit) in [(-1, 0), (0, -1), (i64::MIN, 0), (0, i64::MIN), (-2, -1)] {
        let request = cx.request_of(required, limit);
        refused_as(cx.create(&request), &[Code::InvalidArgument, Code::OutOfRange])?;
    }
    Ok(())
}

/// Row: T6.
fn a_negative_size_is_named_with_its_value(cx: &mut Cx<'_>) -> Result<()> {
    let request = cx.request_of(-5, 0);
    let status = refused(cx.create(&request), Code::InvalidArgument)?;
    says(&status, &["required_bytes", "-5"])?;
    let request = cx.request_of(0, -7);
    let status = refused(cx.create(&request), Code::InvalidArgument)?;
    says(&status, &["limit_bytes", "-7"])
}

/// Row: T7.
fn required_above_the_limit_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    let size = cx.options.size;
    let request = cx.request_of(size, size - 1);
    let codes: &[Code] = if cx.options.rows {
        &[Code::InvalidArgument]
    } else {
        &[Code::InvalidArgument, Code::OutOfRange]
    };
    refused_as(cx.create(&request), codes).map(|_| ())
}

/// Row: T8.
fn without_a_range_a_volume_has_a_size(cx: &mut Cx<'_>) -> Result<()> {
    let request = CreateVolumeRequest { capacity_range: None, ..cx.request() };
    cx.create(&request)?;
    Ok(())
}

/// Row: T8.
fn the_default_is_one_gibibyte(cx: &mut Cx<'_>) -> Result<()> {
    for capacity_range in [None, range(0, 0), range(0, DEFAULT_SIZE), range(0, DEFAULT_SIZE + 1)] {
        let request = CreateVolumeRequest { capacity_range, ..cx.request() };
        let volume = cx.create(&request)?;
        ensure!(volume.capacity_bytes == DEFAULT_SIZE, "{capacity_range:?}: {volume:?}");
    }
    Ok(())
}

/// Row: T8.
fn a_limit_below_the_default_is_the_size(cx: &mut Cx<'_>) -> Result<()> {
    for (limit, size) in
        [(100 * MIB, 100 * MIB), (DEFAULT_SIZE - LARGEST_BLOCK, DEFAULT_SIZE - LARGEST_BLOCK)]
    {
        let request = cx.request_of(0, limit);
        let volume = cx.create(&request)?;
        ensure!(volume.capacity_bytes == size, "limited to {limit}: {}", volume.capacity_bytes);
    }
    let odd = 100 * MIB + 1;
    let request = cx.request_of(0, odd);
    let has = cx.create(&request)?.capacity_bytes;
    ensure!(has <= odd && has > odd - LARGEST_BLOCK, "limited to {odd}: {has}");
    Ok(())
}

/// Row: T8.
fn a_limit_of_less_than_a_block_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    for limit in [1, 511] {
        let request = CreateVolumeRequest { capacity_range: range(0, limit), ..cx.block_request() };
        refused_as(cx.create(&request), &[Code::InvalidArgument, Code::OutOfRange])?;
    }
    Ok(())
}

/// Row: T10.
fn required_equal_to_the_limit_is_exactly_that(cx: &mut Cx<'_>) -> Result<()> {
    let size = cx.options.size;
    for size in [size, size + LARGEST_BLOCK, 2 * size - LARGEST_BLOCK] {
        let request = cx.request_of(size, size);
        let has = cx.create(&request)?.capacity_bytes;
        ensure!(has == size, "{has} in place of {size}");
    }
    Ok(())
}

/// Row: T10.
fn a_size_that_cannot_be_exact_is_out_of_range(cx: &mut Cx<'_>) -> Result<()> {
    let size = cx.options.size;
    for size in [size + 1, size + 511, size - 1] {
        let request = cx.request_of(size, size);
        refused(cx.create(&request), Code::OutOfRange)?;
    }
    Ok(())
}

/// Row: T10.
fn an_odd_size_is_rounded_up_to_a_block(cx: &mut Cx<'_>) -> Result<()> {
    let size = cx.options.size;
    for odd in [size + 1, size + 511, size - 1] {
        let request = cx.request_of(odd, 0);
        let has = cx.create(&request)?.capacity_bytes;
        ensure!((odd..odd + LARGEST_BLOCK).contains(&has) && has % 512 == 0, "{odd}: {has}");
    }
    Ok(())
}

/// Row: T24.
fn a_size_of_37_mib_is_38797312_bytes_everywhere(cx: &mut Cx<'_>) -> Result<()> {
    let request = cx.request_of(38_797_312, 38_797_312);
    let volume = cx.create(&request)?;
    ensure!(volume.capacity_bytes == 38_797_312, "created: {}", volume.capacity_bytes);
    let again = cx.create(&request)?;
    ensure!(again.capacity_bytes == 38_797_312, "created again: {}", again.capacity_bytes);
    let asked = ControllerGetVolumeRequest { volume_id: volume.volume_id.clone() };
    let got = cx.driver.controller_get_volume(asked)?.volume.context("no volume")?;
    ensure!(got.capacity_bytes == 38_797_312, "got: {}", got.capacity_bytes);
    let listed = cx.driver.all_volumes(0)?;
    let listed = listed.into_iter().find(|one| one.volume_id == volume.volume_id);
    let listed = listed.context("it is not listed")?.capacity_bytes;
    ensure!(listed == 38_797_312, "listed: {listed}");
    Ok(())
}

/// The smallest volume for each use, by the default configuration.
fn minima() -> [(VolumeCapability, i64); 4] {
    let mode = Mode::SingleNodeWriter;
    [
        (block(mode), 8 * MIB),
        (mounted_as("ext4", mode), 32 * MIB),
        (mounted_as("xfs", mode), 300 * MIB),
        (mounted_as("btrfs", mode), 200 * MIB),
    ]
}

/// Row: T2.
fn below_the_minimum_is_rounded_up(cx: &mut Cx<'_>) -> Result<()> {
    for (capability, least) in minima() {
        for (required, limit) in [(1, 0), (least - 1, 0), (1, least), (least, least)] {
            let volume_capabilities = vec![capability.clone()];
            let request =
                CreateVolumeRequest { volume_capabilities, ..cx.request_of(required, limit) };
            let has = cx.create(&request)?.capacity_bytes;
            ensure!(has == least, "{capability:?}, {required} to {limit}: {has}");
        }
    }
    Ok(())
}

/// Row: T2.
fn below_the_minimum_and_limited_is_out_of_range(cx: &mut Cx<'_>) -> Result<()> {
    for (capability, least) in minima() {
        for (required, limit) in [(1, least - 1), (0, least - 1), (least - 512, least - 512)] {
            let volume_capabilities = vec![capability.clone()];
            let request =
                CreateVolumeRequest { volume_capabilities, ..cx.request_of(required, limit) };
            refused(cx.create(&request), Code::OutOfRange)
                .with_context(|| format!("{capability:?}, {required} to {limit}"))?;
        }
    }
    Ok(())
}

/// Row: T11.
fn a_size_that_overflows_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    for size in [i64::MAX, i64::MAX - 511, i64::MAX / 2 + 1] {
        for limit in [0, size] {
            let request = cx.request_of(size, limit);
            refused_as(cx.create(&request), &[Code::OutOfRange, Code::ResourceExhausted])?;
        }
    }
    Ok(())
}

/// Row: T18.
fn more_than_there_is_is_refused_with_both_numbers(cx: &mut Cx<'_>) -> Result<()> {
    let parameters = cx.options.parameters.clone();
    let asked = GetCapacityRequest { parameters, ..Default::default() };
    let free = cx.driver.get_capacity(asked)?.available_capacity;
    let size = free / LARGEST_BLOCK * LARGEST_BLOCK + 1024 * MIB;
    let request = cx.request_of(size, 0);
    let status = refused(cx.create(&request), Code::ResourceExhausted)?;
    says(&status, &[&free.to_string(), &size.to_string()])
}

/// Row: T33.
fn sizes_around_each_step_are_kept(cx: &mut Cx<'_>) -> Result<()> {
    let steps = [DEFAULT_SIZE, 256 * MIB, 256 * MIB + 256 * 1024];
    for step in steps {
        for size in [step - LARGEST_BLOCK, step, step + LARGEST_BLOCK] {
            let request = cx.request_of(size, 0);
            let volume = cx.create(&request)?;
            ensure!(volume.capacity_bytes == size, "{size}: {}", volume.capacity_bytes);
            cx.delete(&volume.volume_id)?;
        }
    }
    Ok(())
}
