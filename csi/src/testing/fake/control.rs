//! The service over that daemon.

use std::pin::Pin;

use blockd_api::v1;
use blockd_api::v1::control_server::Control;
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use super::{Fake, State};

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The calls that are there, and those that the plugin must not make.
macro_rules! control {
    (
        never { $($never:ident: $asked:ident -> $answer:ident;)* }
        $($name:ident: $request:ident -> $response:ident = $act:expr;)*
    ) => {
        #[tonic::async_trait]
        impl Control for Fake {
            type PoolExtentsStream = Events<v1::PoolExtentsResponse>;
            type DiffVolumeStream = Events<v1::DiffVolumeResponse>;
            type EventsStream = Events<v1::Event>;
            type DeclareHostDeadStream = Events<v1::HostStep>;
            type ForgetHostStream = Events<v1::HostStep>;

            $(
                async fn $name(
                    &self,
                    request: Request<v1::$request>,
                ) -> Result<Response<v1::$response>, Status> {
                    self.call(stringify!($name), request, $act).await
                }
            )*

            $(
                async fn $never(
                    &self,
                    _: Request<v1::$asked>,
                ) -> Result<Response<v1::$answer>, Status> {
                    panic!(stringify!($never))
                }
            )*

            async fn pool_extents(
                &self,
                _: Request<v1::PoolExtentsRequest>,
            ) -> Result<Response<Self::PoolExtentsStream>, Status> {
                panic!("pool_extents")
            }

            async fn declare_host_dead(
                &self,
                _: Request<v1::DeclareHostDeadRequest>,
            ) -> Result<Response<Self::DeclareHostDeadStream>, Status> {
                panic!("declare_host_dead")
            }

            async fn forget_host(
                &self,
                _: Request<v1::ForgetHostRequest>,
            ) -> Result<Response<Self::ForgetHostStream>, Status> {
                panic!("forget_host")
            }

            async fn diff_volume(
                &self,
                request: Request<v1::DiffVolumeRequest>,
            ) -> Result<Response<Self::DiffVolumeStream>, Status> {
                let opened = self.call("diff_volume", request, State::differences).await?;
                let ranges = opened.into_inner();
                (ranges.script.opened)(self);
                Ok(Response::new(Box::pin(ranges)))
            }

            async fn events(
                &self,
                _: Request<v1::EventsRequest>,
            ) -> Result<Response<Self::EventsStream>, Status> {
                panic!("events")
            }
        }
    };
}

control! {
    never {
        create_pool: CreatePoolRequest -> CreatePoolResponse;
        clone_volumes: CloneVolumesRequest -> CloneVolumesResponse;
        reset_volume: ResetVolumeRequest -> ResetVolumeResponse;
        open_pool: OpenPoolRequest -> OpenPoolResponse;
        close_pool: ClosePoolRequest -> ClosePoolResponse;
        delete_pool: DeletePoolRequest -> DeletePoolResponse;
        export_pool: ExportPoolRequest -> ExportPoolResponse;
        rename_pool: RenamePoolRequest -> RenamePoolResponse;
        import_pool: ImportPoolRequest -> ImportPoolResponse;
        grow_pool: GrowPoolRequest -> GrowPoolResponse;
        fold_pool: FoldPoolRequest -> FoldPoolResponse;
        add_volume: AddVolumeRequest -> AddVolumeResponse;
        add_pool_device: AddPoolDeviceRequest -> AddPoolDeviceResponse;
        remove_pool_device: RemovePoolDeviceRequest -> RemovePoolDeviceResponse;
        rebalance_pool: RebalancePoolRequest -> RebalancePoolResponse;
        set_pool_feature: SetPoolFeatureRequest -> SetPoolFeatureResponse;
        rollback_volume: RollbackVolumeRequest -> RollbackVolumeResponse;
        rename_volume: RenameVolumeRequest -> RenameVolumeResponse;
        space: SpaceRequest -> SpaceResponse;
        recover_devices: RecoverDevicesRequest -> RecoverDevicesResponse;
        list_connections: ListConnectionsRequest -> ListConnectionsResponse;
        stats: StatsRequest -> StatsResponse;
        add_volume_group: AddVolumeGroupRequest -> AddVolumeGroupResponse;
        remove_volume_group: RemoveVolumeGroupRequest -> RemoveVolumeGroupResponse;
        release_cell: ReleaseCellRequest -> ReleaseCellResponse;
        lose_volume_group: LoseVolumeGroupRequest -> LoseVolumeGroupResponse;
        list_nodes: ListNodesRequest -> ListNodesResponse;
        node_status: NodeStatusRequest -> NodeStatusResponse;
        acknowledge_health: AcknowledgeHealthRequest -> AcknowledgeHealthResponse;
    }
    version: VersionRequest -> VersionResponse =
        |_, _| Ok(v1::VersionResponse { ready: true, ..Default::default() });
    list_pools: ListPoolsRequest -> ListPoolsResponse = |state, _| {
        let pools = state.pools.iter().map(|one| state.describe_pool(&one.0)).collect();
        Ok(v1::ListPoolsResponse { pools })
    };
    get_pool: GetPoolRequest -> GetPoolResponse = |state, asked| {
        let name = state.pool(&asked.name)?;
        Ok(v1::GetPoolResponse { pool: Some(state.describe_pool(&name)) })
    };
    create_volume: CreateVolumeRequest -> CreateVolumeResponse = State::create;
    delete_volume: DeleteVolumeRequest -> DeleteVolumeResponse = State::delete;
    get_volume: GetVolumeRequest -> GetVolumeResponse = |state, asked| {
        let volume = match state.on_standby(&asked.pool, &asked.name) {
            Some(standby) => standby,
            None => state.get(&asked.pool, &asked.name)?.clone(),
        };
        Ok(v1::GetVolumeResponse { volume: Some(volume) })
    };
    list_volumes: ListVolumesRequest -> ListVolumesResponse = State::list;
    attach_volume: AttachVolumeRequest -> AttachVolumeResponse = |state, asked| {
        let volume = state.get(&asked.pool, &asked.name)?;
        let changed = !std::mem::replace(&mut volume.attached, true);
        Ok(v1::AttachVolumeResponse { changed, ..Default::default() })
    };
    detach_volume: DetachVolumeRequest -> DetachVolumeResponse = |state, asked| {
        let volume = state.get(&asked.pool, &asked.name)?;
        let changed = std::mem::take(&mut volume.attached);
        Ok(v1::DetachVolumeResponse { changed, ..Default::default() })
    };
    health: HealthRequest -> HealthResponse = State::health;
    resize_volume: ResizeVolumeRequest -> ResizeVolumeResponse = State::resize;
    configure_volume: ConfigureVolumeRequest -> ConfigureVolumeResponse = State::configure;
    create_snapshots: CreateSnapshotsRequest -> CreateSnapshotsResponse = State::snapshot;
    clone_volume: CloneVolumeRequest -> CloneVolumeResponse = State::clone_volume;
    list_volume_groups: ListVolumeGroupsRequest -> ListVolumeGroupsResponse = State::groups;
    create_cell: CreateCellRequest -> CreateCellResponse = State::create_cell;
    take_cell: TakeCellRequest -> TakeCellResponse = State::take_cell;
    stand_by: StandByRequest -> StandByResponse = State::stand_by;
    delete_cell: DeleteCellRequest -> DeleteCellResponse = State::delete_cell;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn causes_that_were_set_are_reported_and_others_are_healthy() {
        let fake = Fake::new(&[("p", 1 << 30)]);
        fake.add("p", "a", 1 << 20);
        fake.add("p", "b", 1 << 20);
        let severity = v1::Severity::Failure.into();
        fake.set_causes("p", "b", &[v1::Cause { severity, ..Default::default() }]);
        let asked = |volume: &str, abnormal_only| v1::HealthRequest {
            volume: volume.to_owned(),
            abnormal_only,
            ..Default::default()
        };
        let all = fake.health(Request::new(asked("", false))).await.unwrap().into_inner();
        let severities: Vec<i32> = all.volumes.iter().map(|one| one.severity).collect();
        assert_eq!((all.pools.len(), severities), (1, vec![0, severity]));
        let one = fake.health(Request::new(asked("b", true))).await.unwrap().into_inner();
        assert_eq!((one.pools.len(), one.volumes.len()), (0, 1));
        assert!(fake.health(Request::new(asked("c", false))).await.is_err());
    }
}
