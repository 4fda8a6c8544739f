-- What the program's first landed version (commit 837ad85) left in its database: pg_dump of a run in which deliveries of every
-- kind came about, without comments and the empty partitions of the days ahead. Receivers listened on port 47921.

set check_function_bodies = off;
SELECT pg_catalog.set_config('search_path', '', false);


CREATE SCHEMA pgboss;

CREATE SCHEMA waybill;

CREATE TYPE pgboss.job_state AS ENUM (
    'created',
    'retry',
    'active',
    'completed',
    'cancelled',
    'failed'
);

CREATE TYPE waybill.breaker AS ENUM (
    'closed',
    'open',
    'half_open'
);

CREATE TYPE waybill.dead_letter_reason AS ENUM (
    'retries_exhausted',
    'endpoint_gone',
    'worker_lost',
    'monthly_attempt_limit'
);

CREATE TYPE waybill.delivery_status AS ENUM (
    'pending',
    'retrying',
    'delivered',
    'dead_lettered'
);

CREATE TYPE waybill.metered AS ENUM (
    'events',
    'attempts'
);

CREATE TYPE waybill.retry_state AS ENUM (
    'succeeded',
    'will_retry',
    'exhausted'
);

CREATE FUNCTION pgboss.create_queue(queue_name text, options jsonb) RETURNS void
    LANGUAGE plpgsql
    AS $_$
    DECLARE
      tablename varchar := CASE WHEN options->>'partition' = 'true'
                            THEN 'j' || encode(sha224(queue_name::bytea), 'hex')
                            ELSE 'job_common'
                            END;
      queue_created_on timestamptz;
    BEGIN

      WITH q as (
        INSERT INTO pgboss.queue (
          name,
          policy,
          retry_limit,
          retry_delay,
          retry_backoff,
          retry_delay_max,
          expire_seconds,
          retention_seconds,
          deletion_seconds,
          warning_queued,
          dead_letter,
          partition,
          table_name,
          heartbeat_seconds,
          notify,
          created_on,
          updated_on
        )
        VALUES (
          queue_name,
          options->>'policy',
          COALESCE((options->>'retryLimit')::int, 2),
          COALESCE((options->>'retryDelay')::int, 0),
          COALESCE((options->>'retryBackoff')::bool, false),
          (options->>'retryDelayMax')::int,
          COALESCE((options->>'expireInSeconds')::int, 900),
          COALESCE((options->>'retentionSeconds')::int, 1209600),
          COALESCE((options->>'deleteAfterSeconds')::int, 604800),
          COALESCE((options->>'warningQueueSize')::int, 0),
          options->>'deadLetter',
          COALESCE((options->>'partition')::bool, false),
          tablename,
          (options->>'heartbeatSeconds')::int,
          COALESCE((options->>'notify')::bool, false),
          pgboss.job_now(),
          pgboss.job_now()
        )
        ON CONFLICT DO NOTHING
        RETURNING created_on
      )
      SELECT created_on into queue_created_on from q;

      IF queue_created_on IS NULL OR options->>'partition' IS DISTINCT FROM 'true' THEN
        RETURN;
      END IF;

      EXECUTE format('CREATE TABLE pgboss.%I (LIKE pgboss.job INCLUDING DEFAULTS)', tablename);

      EXECUTE pgboss.job_table_format($cmd$ALTER TABLE pgboss.job ADD PRIMARY KEY (name, id)$cmd$, tablename);
      EXECUTE pgboss.job_table_format($cmd$ALTER TABLE pgboss.job ADD CONSTRAINT q_fkey FOREIGN KEY (name) REFERENCES pgboss.queue (name) ON DELETE RESTRICT DEFERRABLE INITIALLY DEFERRED$cmd$, tablename);
      EXECUTE pgboss.job_table_format($cmd$ALTER TABLE pgboss.job ADD CONSTRAINT dlq_fkey FOREIGN KEY (dead_letter) REFERENCES pgboss.queue (name) ON DELETE RESTRICT DEFERRABLE INITIALLY DEFERRED$cmd$, tablename);

      EXECUTE pgboss.job_table_format($cmd$CREATE INDEX job_i11 ON pgboss.job (name, priority DESC, created_on, start_after) WHERE state < 'active' AND NOT blocked$cmd$, tablename);
      EXECUTE pgboss.job_table_format($cmd$CREATE UNIQUE INDEX job_i4 ON pgboss.job (name, singleton_on, COALESCE(singleton_key, '')) WHERE state <> 'cancelled' AND singleton_on IS NOT NULL$cmd$, tablename);
      EXECUTE pgboss.job_table_format($cmd$CREATE INDEX job_i7 ON pgboss.job (name, group_id) WHERE state = 'active' AND group_id IS NOT NULL$cmd$, tablename);
      EXECUTE pgboss.job_table_format($cmd$CREATE INDEX job_i9 ON pgboss.job (name, id) WHERE blocking AND state = 'completed'$cmd$, tablename);
      EXECUTE pgboss.job_table_format($cmd$CREATE INDEX job_i12 ON pgboss.job (source_root_id) WHERE source_root_id IS NOT NULL$cmd$, tablename);

      IF options->>'policy' = 'short' THEN
        EXECUTE pgboss.job_table_format($cmd$CREATE UNIQUE INDEX job_i1 ON pgboss.job (name, COALESCE(singleton_key, '')) WHERE state = 'created' AND policy = 'short'$cmd$, tablename);
      ELSIF options->>'policy' = 'singleton' THEN
        EXECUTE pgboss.job_table_format($cmd$CREATE UNIQUE INDEX job_i2 ON pgboss.job (name, COALESCE(singleton_key, '')) WHERE state = 'active' AND policy = 'singleton'$cmd$, tablename);
      ELSIF options->>'policy' = 'stately' THEN
        EXECUTE pgboss.job_table_format($cmd$CREATE UNIQUE INDEX job_i3 ON pgboss.job (name, state, COALESCE(singleton_key, '')) WHERE state <= 'active' AND policy = 'stately'$cmd$, tablename);
      ELSIF options->>'policy' = 'exclusive' THEN
        EXECUTE pgboss.job_table_format($cmd$CREATE UNIQUE INDEX job_i6 ON pgboss.job (name, COALESCE(singleton_key, '')) WHERE state <= 'active' AND policy = 'exclusive'$cmd$, tablename);
      ELSIF options->>'policy' = 'key_strict_fifo' THEN
        EXECUTE pgboss.job_table_format($cmd$CREATE UNIQUE INDEX job_i8 ON pgboss.job (name, singleton_key) WHERE state IN ('active', 'retry', 'failed') AND policy = 'key_strict_fifo'$cmd$, tablename);
        EXECUTE pgboss.job_table_format($cmd$CREATE INDEX job_i10 ON pgboss.job (name, singleton_key, state DESC, created_on, id) INCLUDE (start_after) WHERE state < 'active' AND NOT blocked AND policy = 'key_strict_fifo'$cmd$, tablename);
        EXECUTE pgboss.job_table_format($cmd$ALTER TABLE pgboss.job ADD CONSTRAINT job_key_strict_fifo_singleton_key_check CHECK (NOT (policy = 'key_strict_fifo' AND singleton_key IS NULL))$cmd$, tablename);
      END IF;

      EXECUTE format('ALTER TABLE pgboss.%I ADD CONSTRAINT cjc CHECK (name=%L)', tablename, queue_name);
      EXECUTE format('ALTER TABLE pgboss.job ATTACH PARTITION pgboss.%I FOR VALUES IN (%L)', tablename, queue_name);
    END;
    $_$;

CREATE FUNCTION pgboss.delete_queue(queue_name text) RETURNS void
    LANGUAGE plpgsql
    AS $$
    DECLARE
      v_table varchar;
      v_partition bool;
    BEGIN
      
      SELECT table_name, partition
      FROM pgboss.queue
      WHERE name = queue_name
      INTO v_table, v_partition;

      IF v_partition THEN
        EXECUTE format('DROP TABLE IF EXISTS pgboss.%I', v_table);
      ELSE
        EXECUTE format('DELETE FROM pgboss.%I WHERE name = %L', v_table, queue_name);
      END IF;
    
      DELETE FROM pgboss.queue WHERE name = queue_name;
    END;
    $$;

CREATE FUNCTION pgboss.job_now() RETURNS timestamp with time zone
    LANGUAGE sql STABLE
    AS $$
      SELECT pg_catalog.now();
    $$;

CREATE FUNCTION pgboss.job_table_format(command text, table_name text) RETURNS text
    LANGUAGE sql IMMUTABLE
    AS $_$
      SELECT format(
        regexp_replace(
          regexp_replace(command, '\.job\y', '.%1$I', 'g'),
          '\yjob_i(\d+)', '%1$s_i\1', 'g'
        ),
        table_name
      );
    $_$;

CREATE FUNCTION pgboss.job_table_run(command text, tbl_name text DEFAULT NULL::text, queue_name text DEFAULT NULL::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
    DECLARE
      tbl RECORD;
    BEGIN
      IF queue_name IS NOT NULL THEN
        SELECT table_name INTO tbl_name FROM pgboss.queue WHERE name = queue_name;
      END IF;

      IF tbl_name IS NOT NULL THEN
        EXECUTE pgboss.job_table_format(command, tbl_name);
        RETURN;
      END IF;

      EXECUTE pgboss.job_table_format(command, 'job_common');

      FOR tbl IN SELECT table_name FROM pgboss.queue WHERE partition = true
      LOOP
        EXECUTE pgboss.job_table_format(command, tbl.table_name);
      END LOOP;
    END;
    $$;

CREATE FUNCTION pgboss.job_table_run_async(command_name text, version integer, command text, tbl_name text DEFAULT NULL::text, queue_name text DEFAULT NULL::text) RETURNS void
    LANGUAGE plpgsql
    AS $$
    BEGIN
      IF queue_name IS NOT NULL THEN
        SELECT table_name INTO tbl_name FROM pgboss.queue WHERE name = queue_name;
      END IF;

      IF tbl_name IS NOT NULL THEN
        INSERT INTO pgboss.bam (name, version, status, queue, table_name, command)
        VALUES (
          command_name,
          version,
          'pending',
          queue_name,
          tbl_name,
          pgboss.job_table_format(command, tbl_name)
        );
        RETURN;
      END IF;

      INSERT INTO pgboss.bam (name, version, status, queue, table_name, command)
      SELECT
        command_name,
        version,
        'pending',
        NULL,
        'job_common',
        pgboss.job_table_format(command, 'job_common')
      UNION ALL
      SELECT
        command_name,
        version,
        'pending',
        queue.name,
        queue.table_name,
        pgboss.job_table_format(command, queue.table_name)
      FROM pgboss.queue
      WHERE partition = true;
    END;
    $$;

CREATE FUNCTION waybill.announce(tenant text, about uuid, type text, payload text) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
  event constant uuid := waybill.make_id(clock_timestamp());
  receivers uuid[];
begin
  select array_agg(endpoint_id) into receivers from waybill.endpoints
  where tenant_id = tenant and is_active and endpoint_id <> about and subscribed_events @> array[type];
  if receivers is null then return; end if;
  insert into waybill.events (tenant_id, event_id, event_type, payload, delivery_count) values (tenant, event, type, payload, cardinality(receivers));
  insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, updated_at)
  select tenant, waybill.make_delivery_id(event), event, r, type, true, now() from unnest(receivers) r;
  insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, held)
  select tenant, r, 1, 1 from unnest(receivers) r order by r
  on conflict (tenant_id, endpoint_id) do update set pending = s.pending + 1, held = s.held + 1;
  perform pg_notify('waybill_held', '');
end $$;

CREATE FUNCTION waybill.count_deliveries(tenants text[], endpoints uuid[], statuses waybill.delivery_status[], changes integer[]) RETURNS void
    LANGUAGE sql
    AS $$
  insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, retrying, delivered, dead_lettered)
  select tenant_id, endpoint_id,
    coalesce(sum(change) filter (where status = 'pending'), 0),
    coalesce(sum(change) filter (where status = 'retrying'), 0),
    coalesce(sum(change) filter (where status = 'delivered'), 0),
    coalesce(sum(change) filter (where status = 'dead_lettered'), 0)
  from unnest(tenants, endpoints, statuses, changes) as c (tenant_id, endpoint_id, status, change)
  group by tenant_id, endpoint_id
  order by tenant_id, endpoint_id
  on conflict (tenant_id, endpoint_id) do update set
    pending = s.pending + excluded.pending,
    retrying = s.retrying + excluded.retrying,
    delivered = s.delivered + excluded.delivered,
    dead_lettered = s.dead_lettered + excluded.dead_lettered
$$;

CREATE FUNCTION waybill.count_held(tenants text[], endpoints uuid[], changes integer[]) RETURNS void
    LANGUAGE sql
    AS $$
  insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, held)
  select tenant_id, endpoint_id, sum(change) from unnest(tenants, endpoints, changes) as c (tenant_id, endpoint_id, change)
  group by tenant_id, endpoint_id order by tenant_id, endpoint_id
  on conflict (tenant_id, endpoint_id) do update set held = s.held + excluded.held
$$;

CREATE FUNCTION waybill.enqueue(jobs text) RETURNS void
    LANGUAGE plpgsql
    AS $_$
      #variable_conflict use_column
      begin
        
    INSERT INTO pgboss.jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8 (
      id,
      name,
      data,
      priority,
      start_after,
      created_on,
      singleton_key,
      singleton_on,
      group_id,
      group_tier,
      expire_seconds,
      deletion_seconds,
      keep_until,
      retry_limit,
      retry_delay,
      retry_backoff,
      retry_delay_max,
      policy,
      dead_letter,
      heartbeat_seconds,
      blocked,
      blocking,
      pending_dependencies
    )
    SELECT
      COALESCE(id, gen_random_uuid()) as id,
      'deliveries' as name,
      data,
      COALESCE(priority, 0) as priority,
      j.start_after,
      pgboss.job_now() as created_on,
      "singletonKey",
      CASE
        
        WHEN "singletonSeconds" IS NOT NULL THEN 'epoch'::timestamp + '1s'::interval * ("singletonSeconds"::float8 * floor(( date_part('epoch', pgboss.job_now()) + COALESCE("singletonOffset",0)::float8) / "singletonSeconds"::float8 ))
        ELSE NULL
        END as singleton_on,
      "groupId" as group_id,
      "groupTier" as group_tier,
      COALESCE("expireInSeconds", q.expire_seconds) as expire_seconds,
      COALESCE("deleteAfterSeconds", q.deletion_seconds) as deletion_seconds,
      j.start_after + (COALESCE("retentionSeconds", q.retention_seconds) * interval '1s') as keep_until,
      COALESCE("retryLimit", q.retry_limit) as retry_limit,
      COALESCE("retryDelay", q.retry_delay) as retry_delay,
      COALESCE("retryBackoff", q.retry_backoff, false) as retry_backoff,
      COALESCE("retryDelayMax", q.retry_delay_max) as retry_delay_max,
      q.policy,
      COALESCE("deadLetter", q.dead_letter) as dead_letter,
      COALESCE("heartbeatSeconds", q.heartbeat_seconds) as heartbeat_seconds,
      COALESCE(blocked, false) as blocked,
      COALESCE(blocking, false) as blocking,
      COALESCE("pendingDependencies", 0) as pending_dependencies
    FROM (
      SELECT *,
        CASE
          WHEN (right("startAfter", 1) = 'Z' OR "startAfter" ~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}') THEN CAST("startAfter" as timestamp with time zone)
          ELSE pgboss.job_now() + CAST(COALESCE("startAfter",'0') as interval)
          END as start_after
      FROM json_to_recordset($1::text::json) as x (
        id uuid,
        priority integer,
        data jsonb,
        "startAfter" text,
        "retryLimit" integer,
        "retryDelay" integer,
        "retryDelayMax" integer,
        "retryBackoff" boolean,
        "singletonKey" text,
        "singletonSeconds" integer,
        "singletonOffset" integer,
        
        "groupId" text,
        "groupTier" text,
        "expireInSeconds" integer,
        "deleteAfterSeconds" integer,
        "retentionSeconds" integer,
        "deadLetter" text,
        "heartbeatSeconds" integer,
        blocked boolean,
        blocking boolean,
        "pendingDependencies" integer
      )
    ) j
    JOIN pgboss.queue q ON q.name = 'deliveries'
    ON CONFLICT DO NOTHING
    
  ;
      end $_$;

CREATE FUNCTION waybill.first_delivery_id(event_id uuid) RETURNS uuid
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
  select (substr(event_id::text, 1, 18) || '-0000-000000000000')::uuid
$$;

CREATE FUNCTION waybill.first_id(at timestamp with time zone) RETURNS uuid
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
  select (lpad(to_hex((extract(epoch from at) * 1000)::bigint), 12, '0') || '00000000000000000000')::uuid
$$;

CREATE FUNCTION waybill.last_delivery_id(event_id uuid) RETURNS uuid
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
  select (substr(event_id::text, 1, 18) || '-ffff-ffffffffffff')::uuid
$$;

CREATE FUNCTION waybill.made_at(id uuid) RETURNS timestamp with time zone
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
  select to_timestamp(('x' || translate(substr(id::text, 1, 13), '-', ''))::bit(48)::bigint / 1000.0)
$$;

CREATE FUNCTION waybill.make_delivery_id(event_id uuid) RETURNS uuid
    LANGUAGE sql PARALLEL SAFE
    AS $$
  select (substr(event_id::text, 1, 18) || substr(gen_random_uuid()::text, 19))::uuid
$$;

CREATE FUNCTION waybill.make_id(us bigint) RETURNS uuid
    LANGUAGE sql PARALLEL SAFE
    AS $$
  select (lpad(to_hex(us / 1000), 12, '0') || '7' || lpad(to_hex(us % 1000 * 4096 / 1000), 3, '0') || substr(gen_random_uuid()::text, 20))::uuid
$$;

CREATE FUNCTION waybill.make_id(at timestamp with time zone) RETURNS uuid
    LANGUAGE sql PARALLEL SAFE
    AS $$
  select waybill.make_id((extract(epoch from at) * 1000000)::bigint)
$$;

CREATE FUNCTION waybill.make_partitions(days integer) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
  kind text;
  day date;
  part text;
begin
  perform pg_advisory_xact_lock(hashtext('waybill.make_partitions'));
  foreach kind in array array['events', 'deliveries', 'attempts'] loop
    for day in select d::date from generate_series((now() at time zone 'utc')::date - 1, (now() at time zone 'utc')::date + days, interval '1 day') d loop
      part := format('%s_%s', kind, to_char(day, 'YYYYMMDD'));
      continue when to_regclass('waybill.' || part) is not null;
      execute format('create table waybill.%I (like waybill.%I including all)', part, kind);
      if kind = 'deliveries' then
        -- Every delivery is updated at least once: room in the page keeps the new version beside the old one.
        execute format('alter table waybill.%I set (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05)', part);
      end if;
      execute format('alter table waybill.%I attach partition waybill.%I for values from (%L) to (%L)', kind, part,
        waybill.first_id(day::timestamp at time zone 'utc'), waybill.first_id((day + 1)::timestamp at time zone 'utc'));
    end loop;
  end loop;
end $$;

CREATE FUNCTION waybill.publish(tenants text[], types text[], payloads text[], keys text[], limits jsonb) RETURNS TABLE(item integer, outcome text, event_id uuid, delivery_ids uuid[], details jsonb, same_text boolean, original_type text, original_payload text, rate_limit integer, rate_count integer, window_start timestamp with time zone, window_left integer)
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    AS $$
#variable_conflict use_column
declare
  moment constant timestamptz := clock_timestamp();
  this_month constant date := date_trunc('month', moment at time zone 'utc')::date;
  window_length constant interval := make_interval(secs => (limits ->> 'window_seconds')::int);
  this_window constant timestamptz := date_bin(window_length, moment, 'epoch');
  -- A microsecond apart, so that the order within the batch is the order of the ids.
  moment_us constant bigint := extract(epoch from moment) * 1000000;
  ids constant uuid[] := array(select waybill.make_id(moment_us + i) from generate_subscripts(tenants, 1) i order by i);
  outcomes text[];
  reasons jsonb[];
  rates int[];
  places int[];
  windows timestamptz[];
  jobs text;
  their_tenants text[];
  their_endpoints uuid[];
  holds boolean[];
  tags float8[];
begin
  -- 1. Rate limit. Requests that are refused count as well. This locks the tenants' rows, in order, until the commit.
  with asked as (
    select tenant_id, count(*)::int as n, coalesce((t.limits ->> 'events_write_rate')::int, (publish.limits ->> 'rate')::int) as most
    from unnest(tenants) as u (tenant_id) join waybill.tenants t using (tenant_id) group by tenant_id, t.limits
  ), counted as (
    insert into waybill.rate_windows as w (tenant_id, action, window_start, count)
    select tenant_id, 'events:write', this_window, n from asked where most > 0 order by tenant_id
    on conflict (tenant_id, action) do update set
      count = case when w.window_start < excluded.window_start then excluded.count else w.count + excluded.count end,
      window_start = greatest(w.window_start, excluded.window_start)
    returning tenant_id, window_start, count
  ), judged as (
    select i, most, coalesce(window_start, this_window) as window_start,
      coalesce(count - n + row_number() over (partition by tenant_id order by i), 0) as nth
    from unnest(tenants) with ordinality as u (tenant_id, i) join asked using (tenant_id) left join counted using (tenant_id)
  )
  select array_agg(case when nth > most then 'rate_limited' when types[i] is null then 'counted' end order by i),
         array_agg(most order by i), array_agg(nth order by i), array_agg(window_start order by i)
  into outcomes, rates, places, windows from judged;

  -- 2. Idempotency keys. A concurrent batch with the same key is waited for; its event is visible afterwards.
  if exists (select from unnest(keys, outcomes) as k (key, out) where key is not null and out is null) then
    with claimed as (
      insert into waybill.idempotency_keys (tenant_id, key, event_id)
      select tenants[i], keys[i], ids[i] from generate_subscripts(tenants, 1) i
      where keys[i] is not null and outcomes[i] is null order by tenants[i], keys[i], i
      on conflict do nothing
      returning event_id
    )
    select array_agg(case when outcomes[i] is null and keys[i] is not null and c.event_id is null then 'key_taken' else outcomes[i] end order by i)
    into outcomes from generate_subscripts(tenants, 1) i left join claimed c on c.event_id = ids[i];
  end if;

  -- 3. Match, judge by fan-out and quota, store. The month's count includes what the quota refuses until step 4.
  with wanted as (
    select i, tenants[i] as tenant_id, types[i] as event_type from generate_subscripts(tenants, 1) i where outcomes[i] is null
  ), matched as (
    -- Where deliveries are held, or paced, new ones stand in line behind them.
    select k.tenant_id, k.event_type, array_agg(e.endpoint_id) as endpoint_ids,
      array_agg(coalesce(s.held > 0 or s.breaker <> 'closed', false) or e.ordered or e.max_per_second is not null) as held,
      array_agg(greatest(s.tag, clock.tag)) as tags
    from (select distinct tenant_id, event_type from wanted) k
    join waybill.endpoints e on e.tenant_id = k.tenant_id and e.is_active and e.subscribed_events && array[k.event_type, '*']
    left join waybill.endpoint_stats s on s.tenant_id = e.tenant_id and s.endpoint_id = e.endpoint_id
    cross join waybill.queue_clock clock
    group by k.tenant_id, k.event_type
  ), busy as (
    -- A tenant's turn is shared by its endpoints that have a backlog.
    select s.tenant_id, greatest(1, count(*)) / 64.0 as step from waybill.endpoint_stats s
    where s.tenant_id in (select tenant_id from wanted) and s.pending + s.retrying - s.held > 64 group by s.tenant_id
  ), sized as (
    select w.*, m.endpoint_ids, m.held, m.tags, coalesce(b.step, 1 / 64.0) as step, coalesce(cardinality(m.endpoint_ids), 0) as fanout,
      coalesce((t.limits ->> 'max_fanout_endpoints')::int, (publish.limits ->> 'fanout')::int) as most_fanout,
      coalesce((t.limits ->> 'monthly_events')::bigint, (publish.limits ->> 'monthly_events')::bigint) as most_events,
      coalesce((t.limits ->> 'monthly_attempts')::bigint, (publish.limits ->> 'monthly_attempts')::bigint) as most_attempts,
      coalesce(a.count, 0) as attempts
    from wanted w
    join waybill.tenants t using (tenant_id)
    left join matched m using (tenant_id, event_type)
    left join busy b using (tenant_id)
    left join waybill.usage a on a.tenant_id = w.tenant_id and a.month = this_month and a.metric = 'attempts'
  ), fitting as (
    select *, row_number() over (partition by tenant_id order by i) as nth, count(*) over (partition by tenant_id) as n
    from sized where fanout <= most_fanout and attempts < most_attempts
  ), used as (
    insert into waybill.usage as u (tenant_id, month, metric, count)
    select tenant_id, this_month, 'events', count(*) from fitting group by tenant_id order by tenant_id
    on conflict (tenant_id, month, metric) do update set count = u.count + excluded.count
    returning tenant_id, count
  ), accepted as (
    select f.* from fitting f join used u using (tenant_id) where u.count - f.n + f.nth <= f.most_events
  ), stored as (
    insert into waybill.events (tenant_id, event_id, event_type, payload, idempotency_key, delivery_count)
    select tenant_id, ids[i], event_type, payloads[i], keys[i], fanout from accepted
  ), due as materialized (
    select a.tenant_id, a.i, a.event_type, m.endpoint_id, m.held, waybill.make_delivery_id(ids[a.i]) as delivery_id,
      m.tag + a.step * row_number() over (partition by a.tenant_id, m.endpoint_id order by a.i) as tag
    from accepted a cross join lateral unnest(a.endpoint_ids, a.held, a.tags) as m (endpoint_id, held, tag)
  ), delivering as (
    insert into waybill.deliveries (tenant_id, delivery_id, event_id, endpoint_id, event_type, held, next_attempt_at, updated_at)
    select tenant_id, delivery_id, ids[i], endpoint_id, event_type, held, case when not held then moment end, moment from due
  ), queued as (
    select json_agg(json_build_object('id', delivery_id, 'priority', -floor(tag)::int, 'data', json_build_object('tenant_id', tenant_id, 'tag', tag))
                    order by tag) filter (where not held) as jobs,
      array_agg(tenant_id) as tenant_ids, array_agg(endpoint_id) as endpoint_ids, array_agg(held) as holds, array_agg(tag) as tags
    from due
  ), per_event as (
    select ids[i] as event_id, array_agg(delivery_id order by delivery_id) as delivery_ids from due group by i
  ), verdicts as (
    select s.i,
      case when s.fanout > s.most_fanout then 'fanout' when s.attempts >= s.most_attempts then 'monthly_attempts'
           when a.i is null then 'monthly_events' else 'accepted' end as verdict,
      case when s.fanout > s.most_fanout then jsonb_build_object('limit', s.most_fanout, 'current', s.fanout)
           when s.attempts >= s.most_attempts then jsonb_build_object('limit', s.most_attempts, 'current', s.attempts)
           when a.i is null then jsonb_build_object('limit', s.most_events, 'current', greatest(u.count - f.n, least(u.count - f.n + f.nth - 1, s.most_events)))
           else coalesce(to_jsonb(d.delivery_ids), '[]') end as detail
    from sized s left join fitting f using (i) left join used u on u.tenant_id = s.tenant_id left join accepted a using (i)
    left join per_event d on d.event_id = ids[s.i]
  )
  select array_agg(coalesce(v.verdict, outcomes[i]) order by i), array_agg(v.detail order by i),
    max(q.jobs::text), max(q.tenant_ids), max(q.endpoint_ids), max(q.holds), max(q.tags)
  into outcomes, reasons, jobs, their_tenants, their_endpoints, holds, tags
  from generate_subscripts(tenants, 1) i left join verdicts v using (i) cross join queued q;

  -- 4. What was refused gives its key and its place in the month back.
  if outcomes && array['fanout', 'monthly_events', 'monthly_attempts'] then
    delete from waybill.idempotency_keys k using generate_subscripts(tenants, 1) i
    where k.tenant_id = tenants[i] and k.key = keys[i] and k.event_id = ids[i]
      and outcomes[i] in ('fanout', 'monthly_events', 'monthly_attempts');
    update waybill.usage u set count = u.count - refused.n
    from (select tenants[i] as tenant_id, count(*) as n from generate_subscripts(tenants, 1) i where outcomes[i] = 'monthly_events' group by 1) refused
    where u.tenant_id = refused.tenant_id and u.month = this_month and u.metric = 'events';
  end if;

  -- 5. Queue what is not held and count it all; the endpoints' rows are taken last, because they are the busiest. One
  -- notification a batch, since it takes a global lock at commit.
  if jobs is not null then
    perform waybill.enqueue(jobs);
    perform pg_notify('waybill_due', '');
  end if;
  if holds @> array[true] then perform pg_notify('waybill_held', ''); end if;
  insert into waybill.endpoint_stats as s (tenant_id, endpoint_id, pending, held, tag)
  select d.tenant_id, d.endpoint_id, count(*), count(*) filter (where d.held), coalesce(max(d.tag) filter (where not d.held), 0)
  from unnest(their_tenants, their_endpoints, holds, tags) as d (tenant_id, endpoint_id, held, tag)
  group by d.tenant_id, d.endpoint_id order by d.tenant_id, d.endpoint_id
  on conflict (tenant_id, endpoint_id) do update set
    pending = s.pending + excluded.pending, held = s.held + excluded.held, tag = greatest(s.tag, excluded.tag);

  -- 6. Answer. Only a taken key needs a look at what was there before.
  if not outcomes @> array['key_taken'] then
    return query select i, outcomes[i], ids[i],
      case when outcomes[i] = 'accepted' then array(select d::uuid from jsonb_array_elements_text(reasons[i]) d) end,
      case when outcomes[i] <> 'accepted' then reasons[i] end, null::boolean, null::text, null::text,
      rates[i], places[i], windows[i], ceil(extract(epoch from windows[i] + window_length - moment))::int
    from generate_subscripts(tenants, 1) i order by i;
    return;
  end if;
  return query
  select i, case when outcomes[i] = 'key_taken' and o.event_id is null then 'try_again' else outcomes[i] end,
    coalesce(o.event_id, ids[i]),
    case when outcomes[i] = 'accepted' then array(select d::uuid from jsonb_array_elements_text(reasons[i]) d)
         when o.event_id is not null then array(select d.delivery_id from waybill.deliveries d
           where d.tenant_id = tenants[i] and d.event_id = o.event_id
             and d.delivery_id between waybill.first_delivery_id(o.event_id) and waybill.last_delivery_id(o.event_id) order by 1) end,
    case when outcomes[i] <> 'accepted' then reasons[i] end,
    o.same_text, case when not o.same_text then o.event_type end, case when not o.same_text then o.payload end,
    rates[i], places[i], windows[i], ceil(extract(epoch from windows[i] + window_length - moment))::int
  from generate_subscripts(tenants, 1) i
  left join lateral (
    select e.event_id, e.event_type, e.payload, e.event_type = types[i] and e.payload = payloads[i] as same_text
    from waybill.idempotency_keys k join waybill.events e on e.tenant_id = k.tenant_id and e.event_id = k.event_id
    where outcomes[i] = 'key_taken' and k.tenant_id = tenants[i] and k.key = keys[i]
  ) o on true
  order by i;
end $$;

CREATE FUNCTION waybill.rebase_queue(soft double precision DEFAULT '100000000'::numeric, hard double precision DEFAULT '1000000000'::numeric) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
declare
  base float8;
begin
  select tag into base from waybill.queue_clock;
  if base < soft then return false; end if;
  if base < hard and (select count(*) from (select from pgboss.job where name = 'deliveries' and state < 'active' and priority > -1400000000 limit 10001) j) > 10000 then
    return false;
  end if;
  lock table waybill.events, waybill.deliveries in share row exclusive mode;
  select floor(tag) into base from waybill.queue_clock for update;
  update pgboss.job set priority = least(0, priority + base::int),
    data = case when data ? 'tag' then jsonb_set(data, '{tag}', to_jsonb(greatest(0, (data ->> 'tag')::float8 - base))) else data end
  where name = 'deliveries' and state < 'active' and priority > -1400000000;
  update waybill.endpoint_stats set tag = greatest(0, tag - base) where tag > 0;
  update waybill.queue_clock set tag = tag - base;
  return true;
end $$;

CREATE FUNCTION waybill.release_held(tenants text[], endpoints uuid[], busy integer[], most integer[], lease interval) RETURNS TABLE(tenant_id text, endpoint_id uuid, released integer)
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_custom_plan'
    AS $$
#variable_conflict use_column
declare
  picked record;
  jobs text;
begin
  -- A statement of its own: the next ones must see what whoever had the locks before has released.
  perform from waybill.endpoint_stats s
  join unnest(tenants, endpoints) as a (tenant_id, endpoint_id) on s.tenant_id = a.tenant_id and s.endpoint_id = a.endpoint_id
  order by s.tenant_id, s.endpoint_id for no key update of s;

  with lanes as (
    select s.tenant_id, s.endpoint_id, e.max_per_second, greatest(s.next_slot, now()) as slot, greatest(s.tag, clock.tag) as tag,
      case
        when not e.is_active then 0
        when e.ordered and s.pending + s.retrying > s.held then 0
        when s.breaker = 'open' then (s.next_probe_at <= now())::int
        when e.ordered then 1
        else least(a.most - a.busy, 2 * s.ramp - a.busy,
          ceil(extract(epoch from now() + interval '500 milliseconds' - greatest(s.next_slot, now())) * e.max_per_second)::int)
      end as room
    from unnest(tenants, endpoints, busy, most) as a (tenant_id, endpoint_id, busy, most)
    join waybill.endpoint_stats s on s.tenant_id = a.tenant_id and s.endpoint_id = a.endpoint_id
    join waybill.endpoints e on e.tenant_id = a.tenant_id and e.endpoint_id = a.endpoint_id
    cross join waybill.queue_clock clock
    where s.held > 0
  ), sharing as (
    -- A tenant's turn is shared by its endpoints, as in waybill.publish.
    select l.tenant_id, count(*) / 64.0 as step from lanes l where l.room > 0 group by l.tenant_id
  ), chosen as (
    select l.tenant_id, l.endpoint_id, d.delivery_id, d.spent_retries, l.max_per_second,
      l.tag + x.step * row_number() over lane as tag,
      l.slot + (row_number() over lane - 1) * interval '1 second' / l.max_per_second as slot
    from lanes l join sharing x using (tenant_id) cross join lateral (
      select delivery_id, spent_retries from waybill.deliveries d
      where d.tenant_id = l.tenant_id and d.endpoint_id = l.endpoint_id and d.held
      order by d.delivery_id limit greatest(l.room, 0)) d
    window lane as (partition by l.tenant_id, l.endpoint_id order by d.delivery_id)
  )
  select count(*)::int as n, array_agg(tenant_id) as tenants, array_agg(endpoint_id) as endpoints, array_agg(delivery_id) as ids,
    array_agg(spent_retries) as retries, array_agg(max_per_second) as rates, array_agg(tag) as tags, array_agg(slot) as slots,
    min(delivery_id::text)::uuid as first_id, max(delivery_id::text)::uuid as last_id
  into picked from chosen;
  if picked.n = 0 then return; end if;

  -- The bounds are for the planner, which then looks at the partitions between them only.
  update waybill.deliveries d set held = false, spent_retries = 0, next_attempt_at = coalesce(p.slot, now()), updated_at = now()
  from unnest(picked.tenants, picked.ids, picked.slots) as p (tenant_id, delivery_id, slot)
  where d.tenant_id = p.tenant_id and d.delivery_id = p.delivery_id and d.delivery_id between picked.first_id and picked.last_id;

  update waybill.endpoint_stats s set
    held = s.held - c.n,
    tag = greatest(s.tag, c.tag),
    next_slot = coalesce(c.last_slot + interval '1 second' / c.rate, s.next_slot),
    probing = case when s.breaker = 'open' then c.first_id end,
    next_probe_at = case when s.breaker = 'open' then now() + lease end
  from (select tenant_id, endpoint_id, count(*)::int as n, max(slot) as last_slot, max(rate) as rate,
          max(tag) filter (where retries = 0) as tag, min(delivery_id::text)::uuid as first_id
        from unnest(picked.tenants, picked.endpoints, picked.ids, picked.retries, picked.rates, picked.tags, picked.slots)
          as p (tenant_id, endpoint_id, delivery_id, retries, rate, tag, slot) group by 1, 2) c
  where s.tenant_id = c.tenant_id and s.endpoint_id = c.endpoint_id;

  select json_agg(json_build_object('id', id,
      'priority', case when retries > 0 then waybill.retry_priority(now()) else -floor(tag)::int end,
      'data', json_build_object('tenant_id', tenant_id, 'tag', case when retries = 0 then tag end, 'slot', extract(epoch from slot) * 1000)) order by id)::text
  into jobs from unnest(picked.tenants, picked.ids, picked.retries, picked.tags, picked.slots) as p (tenant_id, id, retries, tag, slot);
  perform waybill.enqueue(jobs);
  -- started_on is empty, so the next claim is this very retry and not one more.
  update pgboss.job j set retry_count = r.retries
  from unnest(picked.ids, picked.retries) as r (id, retries) where j.name = 'deliveries' and j.id = r.id and r.retries > 0;
  perform pg_notify('waybill_due', '');
  return query select c.t, c.e, count(*)::int from unnest(picked.tenants, picked.endpoints) as c (t, e) group by c.t, c.e;
end $$;

CREATE FUNCTION waybill.retry_priority(due timestamp with time zone) RETURNS integer
    LANGUAGE sql STABLE
    AS $$
  select -1400000000 - greatest(0, ceil(extract(epoch from due - '2026-01-01 00:00+00'::timestamptz)))::int
$$;

CREATE TABLE pgboss.bam (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    status text DEFAULT 'pending'::text NOT NULL,
    queue text,
    table_name text NOT NULL,
    command text NOT NULL,
    error text,
    created_on timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    started_on timestamp with time zone,
    completed_on timestamp with time zone
);

CREATE TABLE pgboss.job (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    name text NOT NULL,
    priority integer DEFAULT 0 NOT NULL,
    data jsonb,
    state pgboss.job_state DEFAULT 'created'::pgboss.job_state NOT NULL,
    retry_limit integer DEFAULT 2 NOT NULL,
    retry_count integer DEFAULT 0 NOT NULL,
    retry_delay integer DEFAULT 0 NOT NULL,
    retry_backoff boolean DEFAULT false NOT NULL,
    retry_delay_max integer,
    expire_seconds integer DEFAULT 900 NOT NULL,
    deletion_seconds integer DEFAULT 604800 NOT NULL,
    singleton_key text,
    singleton_on timestamp without time zone,
    group_id text,
    group_tier text,
    start_after timestamp with time zone DEFAULT now() NOT NULL,
    created_on timestamp with time zone DEFAULT now() NOT NULL,
    started_on timestamp with time zone,
    completed_on timestamp with time zone,
    keep_until timestamp with time zone DEFAULT (now() + '336:00:00'::interval) NOT NULL,
    output jsonb,
    dead_letter text,
    policy text,
    heartbeat_on timestamp with time zone,
    heartbeat_seconds integer,
    blocked boolean DEFAULT false NOT NULL,
    blocking boolean DEFAULT false NOT NULL,
    pending_dependencies integer DEFAULT 0 NOT NULL,
    source_name text,
    source_id uuid,
    source_created_on timestamp with time zone,
    source_retry_count integer,
    source_output jsonb,
    source_root_id uuid
)
PARTITION BY LIST (name);

CREATE TABLE pgboss.jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8 (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    name text NOT NULL,
    priority integer DEFAULT 0 NOT NULL,
    data jsonb,
    state pgboss.job_state DEFAULT 'created'::pgboss.job_state NOT NULL,
    retry_limit integer DEFAULT 2 NOT NULL,
    retry_count integer DEFAULT 0 NOT NULL,
    retry_delay integer DEFAULT 0 NOT NULL,
    retry_backoff boolean DEFAULT false NOT NULL,
    retry_delay_max integer,
    expire_seconds integer DEFAULT 900 NOT NULL,
    deletion_seconds integer DEFAULT 604800 NOT NULL,
    singleton_key text,
    singleton_on timestamp without time zone,
    group_id text,
    group_tier text,
    start_after timestamp with time zone DEFAULT now() NOT NULL,
    created_on timestamp with time zone DEFAULT now() NOT NULL,
    started_on timestamp with time zone,
    completed_on timestamp with time zone,
    keep_until timestamp with time zone DEFAULT (now() + '336:00:00'::interval) NOT NULL,
    output jsonb,
    dead_letter text,
    policy text,
    heartbeat_on timestamp with time zone,
    heartbeat_seconds integer,
    blocked boolean DEFAULT false NOT NULL,
    blocking boolean DEFAULT false NOT NULL,
    pending_dependencies integer DEFAULT 0 NOT NULL,
    source_name text,
    source_id uuid,
    source_created_on timestamp with time zone,
    source_retry_count integer,
    source_output jsonb,
    source_root_id uuid,
    CONSTRAINT cjc CHECK ((name = 'deliveries'::text))
)
WITH (autovacuum_vacuum_threshold='1000', autovacuum_vacuum_scale_factor='0.01', autovacuum_vacuum_cost_delay='0', fillfactor='70');

CREATE TABLE pgboss.job_common (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    name text NOT NULL,
    priority integer DEFAULT 0 NOT NULL,
    data jsonb,
    state pgboss.job_state DEFAULT 'created'::pgboss.job_state NOT NULL,
    retry_limit integer DEFAULT 2 NOT NULL,
    retry_count integer DEFAULT 0 NOT NULL,
    retry_delay integer DEFAULT 0 NOT NULL,
    retry_backoff boolean DEFAULT false NOT NULL,
    retry_delay_max integer,
    expire_seconds integer DEFAULT 900 NOT NULL,
    deletion_seconds integer DEFAULT 604800 NOT NULL,
    singleton_key text,
    singleton_on timestamp without time zone,
    group_id text,
    group_tier text,
    start_after timestamp with time zone DEFAULT now() NOT NULL,
    created_on timestamp with time zone DEFAULT now() NOT NULL,
    started_on timestamp with time zone,
    completed_on timestamp with time zone,
    keep_until timestamp with time zone DEFAULT (now() + '336:00:00'::interval) NOT NULL,
    output jsonb,
    dead_letter text,
    policy text,
    heartbeat_on timestamp with time zone,
    heartbeat_seconds integer,
    blocked boolean DEFAULT false NOT NULL,
    blocking boolean DEFAULT false NOT NULL,
    pending_dependencies integer DEFAULT 0 NOT NULL,
    source_name text,
    source_id uuid,
    source_created_on timestamp with time zone,
    source_retry_count integer,
    source_output jsonb,
    source_root_id uuid,
    CONSTRAINT job_key_strict_fifo_singleton_key_check CHECK ((NOT ((policy = 'key_strict_fifo'::text) AND (singleton_key IS NULL))))
);

CREATE TABLE pgboss.job_dependency (
    child_name text NOT NULL,
    child_id uuid NOT NULL,
    parent_name text NOT NULL,
    parent_id uuid NOT NULL
);

CREATE TABLE pgboss.queue (
    name text NOT NULL,
    policy text NOT NULL,
    retry_limit integer NOT NULL,
    retry_delay integer NOT NULL,
    retry_backoff boolean NOT NULL,
    retry_delay_max integer,
    expire_seconds integer NOT NULL,
    retention_seconds integer NOT NULL,
    deletion_seconds integer NOT NULL,
    dead_letter text,
    partition boolean NOT NULL,
    table_name text NOT NULL,
    deferred_count integer DEFAULT 0 NOT NULL,
    queued_count integer DEFAULT 0 NOT NULL,
    ready_count integer DEFAULT 0 NOT NULL,
    warning_queued integer DEFAULT 0 NOT NULL,
    active_count integer DEFAULT 0 NOT NULL,
    failed_count integer DEFAULT 0 NOT NULL,
    total_count integer DEFAULT 0 NOT NULL,
    created_delta integer DEFAULT 0 NOT NULL,
    completed_delta integer DEFAULT 0 NOT NULL,
    failed_delta integer DEFAULT 0 NOT NULL,
    delta_on timestamp with time zone,
    delta_seconds integer,
    ready_history integer[] DEFAULT '{}'::integer[] NOT NULL,
    heartbeat_seconds integer,
    notify boolean DEFAULT false NOT NULL,
    singletons_active text[],
    monitor_claim_on timestamp with time zone,
    monitor_on timestamp with time zone,
    maintain_on timestamp with time zone,
    created_on timestamp with time zone DEFAULT now() NOT NULL,
    updated_on timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT queue_check CHECK ((dead_letter IS DISTINCT FROM name))
);

CREATE TABLE pgboss.queue_stats (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    name text NOT NULL,
    deferred_count integer DEFAULT 0 NOT NULL,
    queued_count integer DEFAULT 0 NOT NULL,
    ready_count integer DEFAULT 0 NOT NULL,
    active_count integer DEFAULT 0 NOT NULL,
    failed_count integer DEFAULT 0 NOT NULL,
    total_count integer DEFAULT 0 NOT NULL,
    created_delta integer,
    completed_delta integer,
    failed_delta integer,
    delta_seconds integer,
    delta_on timestamp with time zone,
    captured_on timestamp with time zone DEFAULT now() NOT NULL
)
PARTITION BY RANGE (captured_on);

CREATE TABLE pgboss.queue_stats_20261121 (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    name text NOT NULL,
    deferred_count integer DEFAULT 0 NOT NULL,
    queued_count integer DEFAULT 0 NOT NULL,
    ready_count integer DEFAULT 0 NOT NULL,
    active_count integer DEFAULT 0 NOT NULL,
    failed_count integer DEFAULT 0 NOT NULL,
    total_count integer DEFAULT 0 NOT NULL,
    created_delta integer,
    completed_delta integer,
    failed_delta integer,
    delta_seconds integer,
    delta_on timestamp with time zone,
    captured_on timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE pgboss.queue_stats_20261122 (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    name text NOT NULL,
    deferred_count integer DEFAULT 0 NOT NULL,
    queued_count integer DEFAULT 0 NOT NULL,
    ready_count integer DEFAULT 0 NOT NULL,
    active_count integer DEFAULT 0 NOT NULL,
    failed_count integer DEFAULT 0 NOT NULL,
    total_count integer DEFAULT 0 NOT NULL,
    created_delta integer,
    completed_delta integer,
    failed_delta integer,
    delta_seconds integer,
    delta_on timestamp with time zone,
    captured_on timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE pgboss.schedule (
    name text NOT NULL,
    key text DEFAULT ''::text NOT NULL,
    kind text DEFAULT 'cron'::text NOT NULL,
    cron text NOT NULL,
    timezone text DEFAULT 'UTC'::text,
    data jsonb,
    options jsonb,
    created_on timestamp with time zone DEFAULT now() NOT NULL,
    updated_on timestamp with time zone DEFAULT now() NOT NULL,
    last_job_id uuid,
    CONSTRAINT schedule_kind_check CHECK ((kind = ANY (ARRAY['cron'::text, 'rrule'::text])))
);

CREATE TABLE pgboss.subscription (
    event text NOT NULL,
    name text NOT NULL,
    created_on timestamp with time zone DEFAULT now() NOT NULL,
    updated_on timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE pgboss.version (
    version integer NOT NULL,
    cron_on timestamp with time zone,
    bam_on timestamp with time zone,
    flow_on timestamp with time zone,
    reindex_on timestamp with time zone,
    monitor_backoff_on timestamp with time zone
);

CREATE TABLE pgboss.warning (
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    type text NOT NULL,
    message text NOT NULL,
    data jsonb,
    created_on timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE waybill.api_keys (
    tenant_id text NOT NULL,
    api_key_id uuid NOT NULL,
    name text NOT NULL,
    key_hash bytea NOT NULL
);

CREATE TABLE waybill.attempt_counts (
    tenant_id text NOT NULL,
    endpoint_id uuid NOT NULL,
    hour timestamp with time zone NOT NULL,
    status_code smallint NOT NULL,
    attempts bigint NOT NULL,
    retries bigint NOT NULL,
    duration_ms bigint NOT NULL
)
WITH (fillfactor='70');

CREATE TABLE waybill.attempts (
    tenant_id text NOT NULL,
    delivery_id uuid NOT NULL,
    attempt_number integer NOT NULL,
    endpoint_id uuid NOT NULL,
    url text NOT NULL,
    status_code smallint,
    error text,
    error_message text,
    response_body text,
    response_truncated boolean NOT NULL,
    duration_ms integer NOT NULL,
    retry_state waybill.retry_state NOT NULL,
    next_attempt_at timestamp with time zone,
    started_at timestamp with time zone NOT NULL
)
PARTITION BY RANGE (delivery_id);

CREATE TABLE waybill.attempts_20261120 (
    tenant_id text NOT NULL,
    delivery_id uuid NOT NULL,
    attempt_number integer NOT NULL,
    endpoint_id uuid NOT NULL,
    url text NOT NULL,
    status_code smallint,
    error text,
    error_message text,
    response_body text,
    response_truncated boolean NOT NULL,
    duration_ms integer NOT NULL,
    retry_state waybill.retry_state NOT NULL,
    next_attempt_at timestamp with time zone,
    started_at timestamp with time zone NOT NULL
);

CREATE TABLE waybill.attempts_20261121 (
    tenant_id text NOT NULL,
    delivery_id uuid NOT NULL,
    attempt_number integer NOT NULL,
    endpoint_id uuid NOT NULL,
    url text NOT NULL,
    status_code smallint,
    error text,
    error_message text,
    response_body text,
    response_truncated boolean NOT NULL,
    duration_ms integer NOT NULL,
    retry_state waybill.retry_state NOT NULL,
    next_attempt_at timestamp with time zone,
    started_at timestamp with time zone NOT NULL
);

CREATE TABLE waybill.attempts_20261122 (
    tenant_id text NOT NULL,
    delivery_id uuid NOT NULL,
    attempt_number integer NOT NULL,
    endpoint_id uuid NOT NULL,
    url text NOT NULL,
    status_code smallint,
    error text,
    error_message text,
    response_body text,
    response_truncated boolean NOT NULL,
    duration_ms integer NOT NULL,
    retry_state waybill.retry_state NOT NULL,
    next_attempt_at timestamp with time zone,
    started_at timestamp with time zone NOT NULL
);

CREATE TABLE waybill.attempts_default (
    tenant_id text NOT NULL,
    delivery_id uuid NOT NULL,
    attempt_number integer NOT NULL,
    endpoint_id uuid NOT NULL,
    url text NOT NULL,
    status_code smallint,
    error text,
    error_message text,
    response_body text,
    response_truncated boolean NOT NULL,
    duration_ms integer NOT NULL,
    retry_state waybill.retry_state NOT NULL,
    next_attempt_at timestamp with time zone,
    started_at timestamp with time zone NOT NULL
);

CREATE TABLE waybill.deliveries (
    tenant_id text NOT NULL,
    delivery_id uuid NOT NULL,
    event_id uuid NOT NULL,
    endpoint_id uuid NOT NULL,
    event_type text NOT NULL,
    status waybill.delivery_status DEFAULT 'pending'::waybill.delivery_status NOT NULL,
    held boolean DEFAULT false NOT NULL,
    attempt_count integer DEFAULT 0 NOT NULL,
    earlier_attempts integer DEFAULT 0 NOT NULL,
    spent_retries integer DEFAULT 0 NOT NULL,
    next_attempt_at timestamp with time zone,
    last_attempt_at timestamp with time zone,
    last_status_code smallint,
    last_error text,
    dead_letter_reason waybill.dead_letter_reason,
    updated_at timestamp with time zone NOT NULL,
    completed_at timestamp with time zone
)
PARTITION BY RANGE (delivery_id);

CREATE TABLE waybill.deliveries_20261120 (
    tenant_id text NOT NULL,
    delivery_id uuid NOT NULL,
    event_id uuid NOT NULL,
    endpoint_id uuid NOT NULL,
    event_type text NOT NULL,
    status waybill.delivery_status DEFAULT 'pending'::waybill.delivery_status NOT NULL,
    held boolean DEFAULT false NOT NULL,
    attempt_count integer DEFAULT 0 NOT NULL,
    earlier_attempts integer DEFAULT 0 NOT NULL,
    spent_retries integer DEFAULT 0 NOT NULL,
    next_attempt_at timestamp with time zone,
    last_attempt_at timestamp with time zone,
    last_status_code smallint,
    last_error text,
    dead_letter_reason waybill.dead_letter_reason,
    updated_at timestamp with time zone NOT NULL,
    completed_at timestamp with time zone
)
WITH (fillfactor='80', autovacuum_vacuum_scale_factor='0.05');

CREATE TABLE waybill.deliveries_20261121 (
    tenant_id text NOT NULL,
    delivery_id uuid NOT NULL,
    event_id uuid NOT NULL,
    endpoint_id uuid NOT NULL,
    event_type text NOT NULL,
    status waybill.delivery_status DEFAULT 'pending'::waybill.delivery_status NOT NULL,
    held boolean DEFAULT false NOT NULL,
    attempt_count integer DEFAULT 0 NOT NULL,
    earlier_attempts integer DEFAULT 0 NOT NULL,
    spent_retries integer DEFAULT 0 NOT NULL,
    next_attempt_at timestamp with time zone,
    last_attempt_at timestamp with time zone,
    last_status_code smallint,
    last_error text,
    dead_letter_reason waybill.dead_letter_reason,
    updated_at timestamp with time zone NOT NULL,
    completed_at timestamp with time zone
)
WITH (fillfactor='80', autovacuum_vacuum_scale_factor='0.05');

CREATE TABLE waybill.deliveries_20261122 (
    tenant_id text NOT NULL,
    delivery_id uuid NOT NULL,
    event_id uuid NOT NULL,
    endpoint_id uuid NOT NULL,
    event_type text NOT NULL,
    status waybill.delivery_status DEFAULT 'pending'::waybill.delivery_status NOT NULL,
    held boolean DEFAULT false NOT NULL,
    attempt_count integer DEFAULT 0 NOT NULL,
    earlier_attempts integer DEFAULT 0 NOT NULL,
    spent_retries integer DEFAULT 0 NOT NULL,
    next_attempt_at timestamp with time zone,
    last_attempt_at timestamp with time zone,
    last_status_code smallint,
    last_error text,
    dead_letter_reason waybill.dead_letter_reason,
    updated_at timestamp with time zone NOT NULL,
    completed_at timestamp with time zone
)
WITH (fillfactor='80', autovacuum_vacuum_scale_factor='0.05');

CREATE TABLE waybill.deliveries_default (
    tenant_id text NOT NULL,
    delivery_id uuid NOT NULL,
    event_id uuid NOT NULL,
    endpoint_id uuid NOT NULL,
    event_type text NOT NULL,
    status waybill.delivery_status DEFAULT 'pending'::waybill.delivery_status NOT NULL,
    held boolean DEFAULT false NOT NULL,
    attempt_count integer DEFAULT 0 NOT NULL,
    earlier_attempts integer DEFAULT 0 NOT NULL,
    spent_retries integer DEFAULT 0 NOT NULL,
    next_attempt_at timestamp with time zone,
    last_attempt_at timestamp with time zone,
    last_status_code smallint,
    last_error text,
    dead_letter_reason waybill.dead_letter_reason,
    updated_at timestamp with time zone NOT NULL,
    completed_at timestamp with time zone
);

CREATE TABLE waybill.endpoint_stats (
    tenant_id text NOT NULL,
    endpoint_id uuid NOT NULL,
    pending bigint DEFAULT 0 NOT NULL,
    retrying bigint DEFAULT 0 NOT NULL,
    delivered bigint DEFAULT 0 NOT NULL,
    dead_lettered bigint DEFAULT 0 NOT NULL,
    held bigint DEFAULT 0 NOT NULL,
    tag double precision DEFAULT 0 NOT NULL,
    recent_status_codes smallint[] DEFAULT '{}'::smallint[] NOT NULL,
    last_success_at timestamp with time zone,
    last_failure_at timestamp with time zone,
    failure_streak integer DEFAULT 0 NOT NULL,
    failing_since timestamp with time zone,
    breaker waybill.breaker DEFAULT 'closed'::waybill.breaker NOT NULL,
    breaker_since timestamp with time zone,
    ramp integer,
    probing uuid,
    next_probe_at timestamp with time zone,
    failed_probes integer DEFAULT 0 NOT NULL,
    next_slot timestamp with time zone
)
WITH (fillfactor='50');

CREATE TABLE waybill.endpoints (
    tenant_id text NOT NULL,
    endpoint_id uuid NOT NULL,
    url text NOT NULL,
    description text,
    subscribed_events text[] NOT NULL,
    is_active boolean DEFAULT true NOT NULL,
    inactive_reason text,
    inactive_since timestamp with time zone,
    max_per_second integer,
    ordered boolean DEFAULT false NOT NULL,
    signing_secret bytea NOT NULL,
    previous_secret bytea,
    previous_secret_expires_at timestamp with time zone,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE waybill.events (
    tenant_id text NOT NULL,
    event_id uuid NOT NULL,
    event_type text NOT NULL,
    payload text NOT NULL,
    idempotency_key text,
    delivery_count integer NOT NULL
)
PARTITION BY RANGE (event_id);

CREATE TABLE waybill.events_20261120 (
    tenant_id text NOT NULL,
    event_id uuid NOT NULL,
    event_type text NOT NULL,
    payload text NOT NULL,
    idempotency_key text,
    delivery_count integer NOT NULL
);

CREATE TABLE waybill.events_20261121 (
    tenant_id text NOT NULL,
    event_id uuid NOT NULL,
    event_type text NOT NULL,
    payload text NOT NULL,
    idempotency_key text,
    delivery_count integer NOT NULL
);

CREATE TABLE waybill.events_20261122 (
    tenant_id text NOT NULL,
    event_id uuid NOT NULL,
    event_type text NOT NULL,
    payload text NOT NULL,
    idempotency_key text,
    delivery_count integer NOT NULL
);

CREATE TABLE waybill.events_default (
    tenant_id text NOT NULL,
    event_id uuid NOT NULL,
    event_type text NOT NULL,
    payload text NOT NULL,
    idempotency_key text,
    delivery_count integer NOT NULL
);

CREATE TABLE waybill.idempotency_keys (
    tenant_id text NOT NULL,
    key text NOT NULL,
    event_id uuid NOT NULL
);

CREATE TABLE waybill.migrations (
    file text NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE waybill.queue_clock (
    tag double precision NOT NULL
);

CREATE UNLOGGED TABLE waybill.rate_windows (
    tenant_id text NOT NULL,
    action text NOT NULL,
    window_start timestamp with time zone NOT NULL,
    count integer NOT NULL
)
WITH (fillfactor='50');

CREATE TABLE waybill.tenants (
    tenant_id text NOT NULL,
    tenant_slug text NOT NULL,
    limits jsonb DEFAULT '{}'::jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE waybill.usage (
    tenant_id text NOT NULL,
    month date NOT NULL,
    metric waybill.metered NOT NULL,
    count bigint NOT NULL
)
WITH (fillfactor='50');

ALTER TABLE ONLY pgboss.job ATTACH PARTITION pgboss.jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8 FOR VALUES IN ('deliveries');

ALTER TABLE ONLY pgboss.job ATTACH PARTITION pgboss.job_common DEFAULT;

ALTER TABLE ONLY pgboss.queue_stats ATTACH PARTITION pgboss.queue_stats_20261121 FOR VALUES FROM ('2026-11-21 00:00:00+00') TO ('2026-11-22 00:00:00+00');

ALTER TABLE ONLY pgboss.queue_stats ATTACH PARTITION pgboss.queue_stats_20261122 FOR VALUES FROM ('2026-11-22 00:00:00+00') TO ('2026-11-23 00:00:00+00');

ALTER TABLE ONLY waybill.attempts ATTACH PARTITION waybill.attempts_20261120 FOR VALUES FROM ('01a1f640-bc00-0000-0000-000000000000') TO ('01a1fb67-1800-0000-0000-000000000000');

ALTER TABLE ONLY waybill.attempts ATTACH PARTITION waybill.attempts_20261121 FOR VALUES FROM ('01a1fb67-1800-0000-0000-000000000000') TO ('01a2008d-7400-0000-0000-000000000000');

ALTER TABLE ONLY waybill.attempts ATTACH PARTITION waybill.attempts_20261122 FOR VALUES FROM ('01a2008d-7400-0000-0000-000000000000') TO ('01a205b3-d000-0000-0000-000000000000');

ALTER TABLE ONLY waybill.attempts ATTACH PARTITION waybill.attempts_default DEFAULT;

ALTER TABLE ONLY waybill.deliveries ATTACH PARTITION waybill.deliveries_20261120 FOR VALUES FROM ('01a1f640-bc00-0000-0000-000000000000') TO ('01a1fb67-1800-0000-0000-000000000000');

ALTER TABLE ONLY waybill.deliveries ATTACH PARTITION waybill.deliveries_20261121 FOR VALUES FROM ('01a1fb67-1800-0000-0000-000000000000') TO ('01a2008d-7400-0000-0000-000000000000');

ALTER TABLE ONLY waybill.deliveries ATTACH PARTITION waybill.deliveries_20261122 FOR VALUES FROM ('01a2008d-7400-0000-0000-000000000000') TO ('01a205b3-d000-0000-0000-000000000000');

ALTER TABLE ONLY waybill.deliveries ATTACH PARTITION waybill.deliveries_default DEFAULT;

ALTER TABLE ONLY waybill.events ATTACH PARTITION waybill.events_20261120 FOR VALUES FROM ('01a1f640-bc00-0000-0000-000000000000') TO ('01a1fb67-1800-0000-0000-000000000000');

ALTER TABLE ONLY waybill.events ATTACH PARTITION waybill.events_20261121 FOR VALUES FROM ('01a1fb67-1800-0000-0000-000000000000') TO ('01a2008d-7400-0000-0000-000000000000');

ALTER TABLE ONLY waybill.events ATTACH PARTITION waybill.events_20261122 FOR VALUES FROM ('01a2008d-7400-0000-0000-000000000000') TO ('01a205b3-d000-0000-0000-000000000000');

ALTER TABLE ONLY waybill.events ATTACH PARTITION waybill.events_default DEFAULT;

INSERT INTO pgboss.jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8 VALUES
	('01a1fe01-e38f-7112-8e2d-8b6bab608393', 'deliveries', -1428037311, '{"tag": 0.03125, "tenant_id": "acme"}', 'retry', 14, 0, 5, true, 36000, 35, 3600, NULL, NULL, NULL, NULL, '2026-11-21 12:08:30.702552+00', '2026-11-21 12:08:19.086946+00', '2026-11-21 12:08:19.111694+00', NULL, '2036-11-18 12:08:19.086946+00', NULL, 'dead_letters', 'standard', NULL, 10, false, false, 0, NULL, NULL, NULL, NULL, NULL, NULL),
	('01a1fe01-e39d-72f5-9682-1df8f902899b', 'deliveries', -1428037312, '{"tag": 0.03125, "slot": null, "tenant_id": "acme"}', 'retry', 14, 0, 5, true, 36000, 35, 3600, NULL, NULL, NULL, NULL, '2026-11-21 12:08:31.634419+00', '2026-11-21 12:08:19.131016+00', '2026-11-21 12:08:21.316853+00', NULL, '2036-11-18 12:08:19.131016+00', NULL, 'dead_letters', 'standard', NULL, 10, false, false, 0, NULL, NULL, NULL, NULL, NULL, NULL),
	('01a1fe01-e412-739d-b98a-3a3a1eb1ccf5', 'deliveries', -1428037312, '{"tag": 0.03125, "slot": null, "tenant_id": "acme"}', 'retry', 14, 0, 5, true, 36000, 35, 3600, NULL, NULL, NULL, NULL, '2026-11-21 12:08:31.191613+00', '2026-11-21 12:08:19.230395+00', '2026-11-21 12:08:21.316853+00', NULL, '2036-11-18 12:08:19.230395+00', NULL, 'dead_letters', 'standard', NULL, 10, false, false, 0, NULL, NULL, NULL, NULL, NULL, NULL),
	('01a1fe01-f501-7d16-a6ff-ae61cd87ce76', 'deliveries', 0, '{"tag": 0.046875, "tenant_id": "acme"}', 'active', 14, 0, 5, true, 36000, 35, 3600, NULL, NULL, NULL, NULL, '2026-11-21 12:08:23.553632+00', '2026-11-21 12:08:23.553632+00', '2026-11-21 12:08:23.56638+00', NULL, '2036-11-18 12:08:23.553632+00', NULL, 'dead_letters', 'standard', '2026-11-21 12:08:23.56638+00', 10, false, false, 0, NULL, NULL, NULL, NULL, NULL, NULL),
	('01a1fe01-fd81-7c87-8377-2928c22cf6a9', 'deliveries', 0, '{"tag": 0.0625, "tenant_id": "acme"}', 'created', 14, 0, 5, true, 36000, 35, 3600, NULL, NULL, NULL, NULL, '2026-11-21 12:08:25.729613+00', '2026-11-21 12:08:25.729613+00', NULL, NULL, '2036-11-18 12:08:25.729613+00', NULL, 'dead_letters', 'standard', NULL, 10, false, false, 0, NULL, NULL, NULL, NULL, NULL, NULL),
	('01a1fe01-fdb8-71f7-9bb5-f97554e04220', 'deliveries', 0, '{"tag": 0.0625, "tenant_id": "acme"}', 'created', 14, 0, 5, true, 36000, 35, 3600, NULL, NULL, NULL, NULL, '2026-11-21 12:08:25.783903+00', '2026-11-21 12:08:25.783903+00', NULL, NULL, '2036-11-18 12:08:25.783903+00', NULL, 'dead_letters', 'standard', NULL, 10, false, false, 0, NULL, NULL, NULL, NULL, NULL, NULL);

INSERT INTO pgboss.queue VALUES
	('__pgboss__send-it', 'standard', 2, 0, false, NULL, 900, 1209600, 604800, NULL, false, 'job_common', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, '{0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}', NULL, false, NULL, '2026-11-21 12:08:24.853443+00', '2026-11-21 12:08:24.861063+00', '2026-11-21 12:07:43.745507+00', '2026-11-21 12:07:42.721517+00', '2026-11-21 12:07:42.721517+00'),
	('retention', 'standard', 3, 60, false, NULL, 3600, 1209600, 604800, NULL, false, 'job_common', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, '{0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}', NULL, false, NULL, '2026-11-21 12:08:24.853443+00', '2026-11-21 12:08:24.861063+00', '2026-11-21 12:07:43.745507+00', '2026-11-21 12:07:42.735529+00', '2026-11-21 12:07:42.735529+00'),
	('dead_letters', 'standard', 1000, 1, false, NULL, 60, 315360000, 3600, NULL, false, 'job_common', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, '{0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}', NULL, false, NULL, '2026-11-21 12:08:24.853443+00', '2026-11-21 12:08:24.861063+00', '2026-11-21 12:07:43.745507+00', '2026-11-21 12:07:41.569291+00', '2026-11-21 12:08:18.318463+00'),
	('partitions', 'standard', 3, 60, false, NULL, 3600, 1209600, 604800, NULL, false, 'job_common', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, '{0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}', NULL, false, NULL, '2026-11-21 12:08:24.853443+00', '2026-11-21 12:08:24.861063+00', '2026-11-21 12:07:43.745507+00', '2026-11-21 12:07:42.76739+00', '2026-11-21 12:07:42.76739+00'),
	('deliveries', 'standard', 14, 5, true, 36000, 35, 315360000, 3600, 'dead_letters', true, 'jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8', 3, 3, 0, 0, 1, 0, 4, 0, 0, 0, NULL, NULL, '{0,0,0,0,2,2,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,3}', 10, false, NULL, '2026-11-21 12:08:24.883712+00', '2026-11-21 12:08:24.888682+00', '2026-11-21 12:07:43.761381+00', '2026-11-21 12:07:41.578862+00', '2026-11-21 12:08:18.32892+00'),
	('queue_clock', 'standard', 3, 60, false, NULL, 3600, 1209600, 604800, NULL, false, 'job_common', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, '{0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}', NULL, false, NULL, '2026-11-21 12:08:24.853443+00', '2026-11-21 12:08:24.861063+00', '2026-11-21 12:07:43.745507+00', '2026-11-21 12:07:42.7722+00', '2026-11-21 12:07:42.7722+00');

INSERT INTO pgboss.schedule VALUES
	('retention', '', 'cron', '17 3 * * *', 'UTC', NULL, '{"tz": "UTC"}', '2026-11-21 12:07:42.764081+00', '2026-11-21 12:08:18.521618+00', NULL),
	('partitions', '', 'cron', '7 * * * *', 'UTC', NULL, '{"tz": "UTC"}', '2026-11-21 12:07:42.770096+00', '2026-11-21 12:08:18.536975+00', NULL),
	('queue_clock', '', 'cron', '37 * * * *', 'UTC', NULL, '{"tz": "UTC"}', '2026-11-21 12:07:42.776644+00', '2026-11-21 12:08:18.548267+00', NULL);

INSERT INTO pgboss.version VALUES
	(43, '2026-11-21 12:08:12.732726+00', '2026-11-21 12:07:41.56767+00', '2026-11-21 12:08:23.460826+00', '2026-11-21 12:07:43.774223+00', NULL);

INSERT INTO waybill.api_keys VALUES
	('acme', '01a1fe01-521c-7b95-ad51-9cd085c05bde', 'k', '\x1310b8ad0f5ce15df9271b75803c66b14106d0d4ce5f99e0b492a5cba17cabdc'),
	('other', '01a1fe01-5230-7441-89a5-aa0c313a86ba', 'k', '\xdae8050aa9871017c01bc05cb123a82c91d8650c9ee89254680f7d6abc7a5cbf');

INSERT INTO waybill.attempt_counts VALUES
	('acme', '01a1fe01-523d-7c28-b96e-9a44cb9b7f3f', '2026-11-21 12:00:00+00', 200, 1, 0, 31),
	('other', '01a1fe01-5299-7e24-9a4b-503ecad1b9d7', '2026-11-21 12:00:00+00', 200, 1, 0, 5),
	('acme', '01a1fe01-5280-7d91-9525-bae08e3cc202', '2026-11-21 12:00:00+00', 410, 1, 0, 6),
	('acme', '01a1fe01-5248-7a51-9572-073c99de8991', '2026-11-21 12:00:00+00', 500, 5, 3, 171),
	('acme', '01a1fe01-5253-7e41-92ec-ef5a76e934a6', '2026-11-21 12:00:00+00', 503, 1, 0, 7),
	('acme', '01a1fe01-5262-7726-bc1b-920d63d72d8c', '2026-11-21 12:00:00+00', 503, 1, 0, 7);

INSERT INTO waybill.attempts_20261121 VALUES
	('acme', '01a1fe01-57a3-7f2b-a7f2-620aeefc7f3a', 1, '01a1fe01-523d-7c28-b96e-9a44cb9b7f3f', 'http://127.0.0.1:47921/fine', 200, NULL, NULL, 'said 200', false, 31, 'succeeded', NULL, '2026-11-21 12:07:44.735+00'),
	('other', '01a1fe01-57c9-7a41-b994-269dd63f9944', 1, '01a1fe01-5299-7e24-9a4b-503ecad1b9d7', 'http://127.0.0.1:47921/other', 200, NULL, NULL, 'said 200', false, 5, 'succeeded', NULL, '2026-11-21 12:07:46.035+00'),
	('acme', '01a1fe01-57c0-7168-bfe5-70b563094522', 1, '01a1fe01-5280-7d91-9525-bae08e3cc202', 'http://127.0.0.1:47921/gone', 410, 'http_status', 'the receiver answered with a status other than 2xx', 'said 410', false, 6, 'exhausted', NULL, '2026-11-21 12:07:46.033+00'),
	('acme', '01a1fe01-57d1-71fb-aad5-34ad1e0ef986', 1, '01a1fe01-5248-7a51-9572-073c99de8991', 'http://127.0.0.1:47921/failing', 500, 'http_status', 'the receiver answered with a status other than 2xx', 'said 500', false, 5, 'will_retry', '2026-11-21 12:07:48.041+00', '2026-11-21 12:07:46.034+00'),
	('acme', '01a1fe01-57d1-71fb-aad5-34ad1e0ef986', 2, '01a1fe01-5248-7a51-9572-073c99de8991', 'http://127.0.0.1:47921/failing', 500, 'http_status', 'the receiver answered with a status other than 2xx', 'said 500', false, 22, 'will_retry', '2026-11-21 12:07:57.723+00', '2026-11-21 12:07:52.769+00'),
	('acme', '01a1fe01-57d1-71fb-aad5-34ad1e0ef986', 3, '01a1fe01-5248-7a51-9572-073c99de8991', 'http://127.0.0.1:47921/failing', 500, 'http_status', 'the receiver answered with a status other than 2xx', 'said 500', false, 2, 'will_retry', '2026-11-21 12:08:14.448+00', '2026-11-21 12:08:00.078+00'),
	('acme', '01a1fe01-57d1-71fb-aad5-34ad1e0ef986', 4, '01a1fe01-5248-7a51-9572-073c99de8991', 'http://127.0.0.1:47921/failing', 500, 'http_status', 'the receiver answered with a status other than 2xx', 'said 500', false, 5, 'exhausted', NULL, '2026-11-21 12:08:17.599+00'),
	('acme', '01a1fe01-e38f-7112-8e2d-8b6bab608393', 1, '01a1fe01-5248-7a51-9572-073c99de8991', 'http://127.0.0.1:47921/failing', 500, 'http_status', 'the receiver answered with a status other than 2xx', 'said 500', false, 137, 'will_retry', '2026-11-21 12:08:30.702+00', '2026-11-21 12:08:22.336+00'),
	('acme', '01a1fe01-e39d-72f5-9682-1df8f902899b', 1, '01a1fe01-5253-7e41-92ec-ef5a76e934a6', 'http://127.0.0.1:47921/ordered', 503, 'http_status', 'the receiver answered with a status other than 2xx', 'said 503', false, 7, 'will_retry', '2026-11-21 12:08:31.634+00', '2026-11-21 12:08:24.459+00'),
	('acme', '01a1fe01-e412-739d-b98a-3a3a1eb1ccf5', 1, '01a1fe01-5262-7726-bc1b-920d63d72d8c', 'http://127.0.0.1:47921/off', 503, 'http_status', 'the receiver answered with a status other than 2xx', 'said 503', false, 7, 'will_retry', '2026-11-21 12:08:31.191+00', '2026-11-21 12:08:24.46+00');

INSERT INTO waybill.deliveries_20261121 VALUES
	('acme', '01a1fe01-57a3-7f2b-a7f2-620aeefc7f3a', '01a1fe01-57a3-7f2b-9824-521e502d27fb', '01a1fe01-523d-7c28-b96e-9a44cb9b7f3f', 'fine', 'delivered', false, 1, 0, 0, NULL, '2026-11-21 12:07:44.735+00', 200, NULL, NULL, '2026-11-21 12:07:44.292405+00', '2026-11-21 12:07:44.292405+00'),
	('other', '01a1fe01-57c9-7a41-b994-269dd63f9944', '01a1fe01-57c9-7a41-a648-ae510c4d0193', '01a1fe01-5299-7e24-9a4b-503ecad1b9d7', 'fine', 'delivered', false, 1, 0, 0, NULL, '2026-11-21 12:07:46.035+00', 200, NULL, NULL, '2026-11-21 12:07:45.455701+00', '2026-11-21 12:07:45.455701+00'),
	('acme', '01a1fe01-57c0-7168-bfe5-70b563094522', '01a1fe01-57c0-7168-9c8a-f20e45a44576', '01a1fe01-5280-7d91-9525-bae08e3cc202', 'gone', 'dead_lettered', false, 1, 0, 0, NULL, '2026-11-21 12:07:46.033+00', 410, 'http_status', 'endpoint_gone', '2026-11-21 12:07:45.454585+00', '2026-11-21 12:07:45.454585+00'),
	('acme', '01a1fe01-57d1-71fb-aad5-34ad1e0ef986', '01a1fe01-57d1-71fb-82cd-8ab9aa0dc8f6', '01a1fe01-5248-7a51-9572-073c99de8991', 'failing', 'dead_lettered', false, 4, 0, 0, NULL, '2026-11-21 12:08:17.599+00', 500, 'http_status', 'retries_exhausted', '2026-11-21 12:08:16.579811+00', '2026-11-21 12:08:16.579811+00'),
	('acme', '01a1fe01-e3af-7922-af4f-53581e07cbfd', '01a1fe01-e3af-7922-b4bb-b11d4eb52453', '01a1fe01-5253-7e41-92ec-ef5a76e934a6', 'ordered', 'pending', true, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, '2026-11-21 12:08:19.11957+00', NULL),
	('acme', '01a1fe01-e3b9-787e-9d42-90121dcc4120', '01a1fe01-e3b9-787e-9854-36ffad5f7707', '01a1fe01-5253-7e41-92ec-ef5a76e934a6', 'ordered', 'pending', true, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, '2026-11-21 12:08:19.12953+00', NULL),
	('acme', '01a1fe01-e41f-7be7-bb24-76dd50df7409', '01a1fe01-e41f-7be7-9712-07efa6c7bd56', '01a1fe01-5262-7726-bc1b-920d63d72d8c', 'off', 'pending', true, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, '2026-11-21 12:08:19.231743+00', NULL),
	('acme', '01a1fe01-e38f-7112-8e2d-8b6bab608393', '01a1fe01-e38f-7112-ad83-b578b857ae7b', '01a1fe01-5248-7a51-9572-073c99de8991', 'failing', 'retrying', false, 1, 0, 0, '2026-11-21 12:08:30.702+00', '2026-11-21 12:08:22.336+00', 500, 'http_status', NULL, '2026-11-21 12:08:21.414267+00', NULL),
	('acme', '01a1fe01-e39d-72f5-9682-1df8f902899b', '01a1fe01-e39d-72f5-bea4-864b4114ab27', '01a1fe01-5253-7e41-92ec-ef5a76e934a6', 'ordered', 'retrying', false, 1, 0, 0, '2026-11-21 12:08:31.634+00', '2026-11-21 12:08:24.459+00', 503, 'http_status', NULL, '2026-11-21 12:08:23.438419+00', NULL),
	('acme', '01a1fe01-e412-739d-b98a-3a3a1eb1ccf5', '01a1fe01-e412-739d-ae8b-673fb2ebbf81', '01a1fe01-5262-7726-bc1b-920d63d72d8c', 'off', 'retrying', false, 1, 0, 0, '2026-11-21 12:08:31.191+00', '2026-11-21 12:08:24.46+00', 503, 'http_status', NULL, '2026-11-21 12:08:23.438419+00', NULL),
	('acme', '01a1fe01-f501-7d16-a6ff-ae61cd87ce76', '01a1fe01-f501-7d16-b529-4b6a33de48ea', '01a1fe01-528a-791e-87c5-185397d03888', 'lost', 'pending', false, 0, 0, 0, '2026-11-21 12:08:23.553817+00', NULL, NULL, NULL, NULL, '2026-11-21 12:08:23.553817+00', NULL),
	('acme', '01a1fe01-fd81-7c87-8377-2928c22cf6a9', '01a1fe01-fd81-7c87-bd45-70f70727b777', '01a1fe01-5291-7662-bd16-29516df2f5e5', 'all', 'pending', false, 0, 0, 0, '2026-11-21 12:08:25.729782+00', NULL, NULL, NULL, NULL, '2026-11-21 12:08:25.729782+00', NULL),
	('acme', '01a1fe01-fd99-7841-82c6-130c8a928b59', '01a1fe01-fd99-7841-97f2-b52cb7d47fa0', '01a1fe01-5270-71db-bdb9-452cfae2fc59', 'paced', 'pending', true, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, '2026-11-21 12:08:25.753515+00', NULL),
	('acme', '01a1fe01-fda5-771a-8a9f-adfecb70456a', '01a1fe01-fda5-771a-8433-97e764c8d33c', '01a1fe01-5270-71db-bdb9-452cfae2fc59', 'paced', 'pending', true, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, '2026-11-21 12:08:25.765443+00', NULL),
	('acme', '01a1fe01-fdb8-71f7-9bb5-f97554e04220', '01a1fe01-fdb8-71f7-b9d9-1b2f56c142d0', '01a1fe01-523d-7c28-b96e-9a44cb9b7f3f', 'fine', 'pending', false, 0, 0, 0, '2026-11-21 12:08:25.784122+00', NULL, NULL, NULL, NULL, '2026-11-21 12:08:25.784122+00', NULL);

INSERT INTO waybill.endpoint_stats VALUES
	('other', '01a1fe01-5299-7e24-9a4b-503ecad1b9d7', 0, 0, 1, 0, 0, 0.015625, '{200}', '2026-11-21 12:07:46.035+00', NULL, 0, NULL, 'closed', NULL, NULL, NULL, NULL, 0, NULL),
	('acme', '01a1fe01-523d-7c28-b96e-9a44cb9b7f3f', 1, 0, 1, 0, 0, 0.0625, '{200}', '2026-11-21 12:07:44.735+00', NULL, 0, NULL, 'closed', NULL, NULL, NULL, NULL, 0, NULL),
	('acme', '01a1fe01-5280-7d91-9525-bae08e3cc202', 0, 0, 0, 1, 0, 0.015625, '{410}', NULL, '2026-11-21 12:07:46.033+00', 0, NULL, 'closed', NULL, NULL, NULL, NULL, 0, NULL),
	('acme', '01a1fe01-5248-7a51-9572-073c99de8991', 0, 1, 0, 1, 0, 0.03125, '{500,500,500,500,500}', NULL, '2026-11-21 12:08:22.336+00', 5, '2026-11-21 12:07:46.034+00', 'closed', NULL, NULL, NULL, NULL, 0, NULL),
	('acme', '01a1fe01-5253-7e41-92ec-ef5a76e934a6', 2, 1, 0, 0, 2, 0.03125, '{503}', NULL, '2026-11-21 12:08:24.459+00', 1, '2026-11-21 12:08:24.459+00', 'closed', NULL, NULL, NULL, NULL, 0, NULL),
	('acme', '01a1fe01-5262-7726-bc1b-920d63d72d8c', 1, 1, 0, 0, 1, 0.03125, '{503}', NULL, '2026-11-21 12:08:24.46+00', 1, '2026-11-21 12:08:24.46+00', 'closed', NULL, NULL, NULL, NULL, 0, NULL),
	('acme', '01a1fe01-528a-791e-87c5-185397d03888', 1, 0, 0, 0, 0, 0.046875, '{}', NULL, NULL, 0, NULL, 'closed', NULL, NULL, NULL, NULL, 0, NULL),
	('acme', '01a1fe01-5291-7662-bd16-29516df2f5e5', 1, 0, 0, 0, 0, 0.0625, '{}', NULL, NULL, 0, NULL, 'closed', NULL, NULL, NULL, NULL, 0, NULL),
	('acme', '01a1fe01-5270-71db-bdb9-452cfae2fc59', 2, 0, 0, 0, 2, 0, '{}', NULL, NULL, 0, NULL, 'closed', NULL, NULL, NULL, NULL, 0, NULL);

INSERT INTO waybill.endpoints VALUES
	('acme', '01a1fe01-5248-7a51-9572-073c99de8991', 'http://127.0.0.1:47921/failing', NULL, '{failing}', true, NULL, NULL, NULL, false, '\x4bb06f8e3b19e2c8f0b057194cfdbcf50c1ccb64343dd5560fa3b6fdbec6cc00d47782174c70749b94e9a22f15bc600c28ff134cf3c3ef0acbc617eb1b3789eb6e747ee9b59729d5fe36720b1c701cef8b85', NULL, NULL, '2026-11-21 12:07:41.896+00'),
	('acme', '01a1fe01-5253-7e41-92ec-ef5a76e934a6', 'http://127.0.0.1:47921/ordered', NULL, '{ordered}', true, NULL, NULL, NULL, true, '\x4bb06f8e9c8721028feff98fcc9c8317883537b2e77506232add3c76bbd4c139532affb6382b22bdeb64b80b5c315652534f92b997c33f89bd0b535540c6af400f35a2e5323d1e3bad17b61e59c633d97d47', NULL, NULL, '2026-11-21 12:07:41.907+00'),
	('acme', '01a1fe01-5270-71db-bdb9-452cfae2fc59', 'http://127.0.0.1:47921/paced', NULL, '{paced}', true, NULL, NULL, 5, false, '\x4bb06f8ecb312fb35795836befe03cff433c37220a957578c8ffcebf5aec728f18160e34b27ed1449399adedc7093e8ca6902a49bc18666d84b9ff0897e8183bcf79fbe978792945d390bb87c7a044618eb8', NULL, NULL, '2026-11-21 12:07:41.936+00'),
	('acme', '01a1fe01-528a-791e-87c5-185397d03888', 'http://127.0.0.1:47921/lost', NULL, '{lost}', true, NULL, NULL, NULL, false, '\x4bb06f8e89df71d83685f7a2a24e8490bbf3202f789246ebf8d69ab821bc53c260a4f6afb7a959db6f80bc6bbb68d4afe167a7b776753c20d0de618b28fa22f6e871cbe58f90d446f93e9fd98e00c9051a80', NULL, NULL, '2026-11-21 12:07:41.962+00'),
	('acme', '01a1fe01-5291-7662-bd16-29516df2f5e5', 'http://127.0.0.1:47921/all', NULL, '{all}', true, NULL, NULL, NULL, false, '\x4bb06f8e3804b4665f5821b646931eb60db1cc970daf9bb42467cfc57d7c5d3bb8bf148827f17212ce6fcafb834cc57da2e0feb4a37b3d2e6e74ac355b0f0b59ca087a69aca682ea90ce57f6fc4249a8a508', NULL, NULL, '2026-11-21 12:07:41.969+00'),
	('other', '01a1fe01-5299-7e24-9a4b-503ecad1b9d7', 'http://127.0.0.1:47921/other', NULL, '{*}', true, NULL, NULL, NULL, false, '\x4bb06f8e70dbbe9c15b720d98a78589848900e61cc45443967917af3639121104da3246700be2f630831bb70ce95bf61c012379841113c3e6cbe99b246bb84233fe45b2788308776a5ababd18843941a346c', NULL, NULL, '2026-11-21 12:07:41.977+00'),
	('acme', '01a1fe01-5280-7d91-9525-bae08e3cc202', 'http://127.0.0.1:47921/gone', NULL, '{gone}', false, 'gone', '2026-11-21 12:07:45.454585+00', NULL, false, '\x4bb06f8e2efa148415b39eedbc4a61cdfd937b7458fe79bcb05d0a4ab9ab56d1e359c857296bf09f3e79f1a4c0e3a65655715270e433ca3af9f6bf4611066bc03858674007b61a97229a0f021aa7b9863dfc', NULL, NULL, '2026-11-21 12:07:45.454585+00'),
	('acme', '01a1fe01-5262-7726-bc1b-920d63d72d8c', 'http://127.0.0.1:47921/off', NULL, '{off}', false, 'tenant', '2026-11-21 12:08:23.524155+00', NULL, true, '\x4bb06f8e495eb31b6dc9f0bce3c6287ef3fa7125369d0c4bb1b88bc16c7dbfa48e72eca6e88d358338937735ace12cdca3c258184fe97d7114732db708e4af96ad2c69dbcb3042dc7ac37debb59de2651d8c', NULL, NULL, '2026-11-21 12:08:23.524155+00'),
	('acme', '01a1fe01-523d-7c28-b96e-9a44cb9b7f3f', 'http://127.0.0.1:47921/fine', NULL, '{fine}', true, NULL, NULL, NULL, false, '\x4bb06f8e3a39d34653ca3d7cf1289fb8658a27a7b7d22c0676b332b0215be41e83c3c8bbdd9792d2aeb9159f56bbec399105da25a5a7eeeed25e103b4b87428b665aad5db923b3f9c57b22e66deb6f5aeba2', '\x4bb06f8eef2bf219d1b1cb4b8d2eb24f03723b62525d7ab9346146b443f16249d47f269487e3bbfc27268f1c59cf14fe2a1860bb3faeea3f7269ddc93a4367213e6d3e7f2f0b867756d3a5211ff2d7fe0793', '2026-11-22 12:08:23.54062+00', '2026-11-21 12:08:23.54062+00');

INSERT INTO waybill.events_20261121 VALUES
	('acme', '01a1fe01-57a3-7f2b-9824-521e502d27fb', 'fine', '{"type":"fine","key":"fine-1","n":"12345678901234567890"}', 'fine-1', 1),
	('acme', '01a1fe01-57c0-7168-9c8a-f20e45a44576', 'gone', '{"type":"gone","key":"gone-1","n":"12345678901234567890"}', 'gone-1', 1),
	('other', '01a1fe01-57c9-7a41-a648-ae510c4d0193', 'fine', '{"type":"fine","key":"fine-2","n":"12345678901234567890"}', 'fine-2', 1),
	('acme', '01a1fe01-57d1-71fb-82cd-8ab9aa0dc8f6', 'failing', '{"type":"failing","key":"failing-1","n":"12345678901234567890"}', 'failing-1', 1),
	('acme', '01a1fe01-e38f-7112-ad83-b578b857ae7b', 'failing', '{"type":"failing","key":"failing-2","n":"12345678901234567890"}', 'failing-2', 1),
	('acme', '01a1fe01-e39d-72f5-bea4-864b4114ab27', 'ordered', '{"type":"ordered","key":"ordered-1","n":"12345678901234567890"}', 'ordered-1', 1),
	('acme', '01a1fe01-e3af-7922-b4bb-b11d4eb52453', 'ordered', '{"type":"ordered","key":"ordered-2","n":"12345678901234567890"}', 'ordered-2', 1),
	('acme', '01a1fe01-e3b9-787e-9854-36ffad5f7707', 'ordered', '{"type":"ordered","key":"ordered-3","n":"12345678901234567890"}', 'ordered-3', 1),
	('acme', '01a1fe01-e412-739d-ae8b-673fb2ebbf81', 'off', '{"type":"off","key":"off-1","n":"12345678901234567890"}', 'off-1', 1),
	('acme', '01a1fe01-e41f-7be7-9712-07efa6c7bd56', 'off', '{"type":"off","key":"off-2","n":"12345678901234567890"}', 'off-2', 1),
	('acme', '01a1fe01-f501-7d16-b529-4b6a33de48ea', 'lost', '{"type":"lost","key":"lost-1","n":"12345678901234567890"}', 'lost-1', 1),
	('acme', '01a1fe01-fd81-7c87-bd45-70f70727b777', 'all', '{"type":"all","key":"all-1","n":"12345678901234567890"}', 'all-1', 1),
	('acme', '01a1fe01-fd99-7841-97f2-b52cb7d47fa0', 'paced', '{"type":"paced","key":"paced-1","n":"12345678901234567890"}', 'paced-1', 1),
	('acme', '01a1fe01-fda5-771a-8433-97e764c8d33c', 'paced', '{"type":"paced","key":"paced-2","n":"12345678901234567890"}', 'paced-2', 1),
	('acme', '01a1fe01-fdb8-71f7-b9d9-1b2f56c142d0', 'fine', '{"type":"fine","key":"fine-3","n":"12345678901234567890"}', 'fine-3', 1);

INSERT INTO waybill.idempotency_keys VALUES
	('acme', 'fine-1', '01a1fe01-57a3-7f2b-9824-521e502d27fb'),
	('acme', 'gone-1', '01a1fe01-57c0-7168-9c8a-f20e45a44576'),
	('other', 'fine-2', '01a1fe01-57c9-7a41-a648-ae510c4d0193'),
	('acme', 'failing-1', '01a1fe01-57d1-71fb-82cd-8ab9aa0dc8f6'),
	('acme', 'failing-2', '01a1fe01-e38f-7112-ad83-b578b857ae7b'),
	('acme', 'ordered-1', '01a1fe01-e39d-72f5-bea4-864b4114ab27'),
	('acme', 'ordered-2', '01a1fe01-e3af-7922-b4bb-b11d4eb52453'),
	('acme', 'ordered-3', '01a1fe01-e3b9-787e-9854-36ffad5f7707'),
	('acme', 'off-1', '01a1fe01-e412-739d-ae8b-673fb2ebbf81'),
	('acme', 'off-2', '01a1fe01-e41f-7be7-9712-07efa6c7bd56'),
	('acme', 'lost-1', '01a1fe01-f501-7d16-b529-4b6a33de48ea'),
	('acme', 'all-1', '01a1fe01-fd81-7c87-bd45-70f70727b777'),
	('acme', 'paced-1', '01a1fe01-fd99-7841-97f2-b52cb7d47fa0'),
	('acme', 'paced-2', '01a1fe01-fda5-771a-8433-97e764c8d33c'),
	('acme', 'fine-3', '01a1fe01-fdb8-71f7-b9d9-1b2f56c142d0');

INSERT INTO waybill.migrations VALUES
	('0001_tenants.sql', '2026-11-21 12:07:41.396476+00'),
	('0002_ids.sql', '2026-11-21 12:07:41.407989+00'),
	('0003_deliveries.sql', '2026-11-21 12:07:41.411231+00'),
	('0004_counters.sql', '2026-11-21 12:07:41.432589+00'),
	('0005_publish.sql', '2026-11-21 12:07:41.459741+00'),
	('0006_lanes.sql', '2026-11-21 12:07:41.468813+00');

INSERT INTO waybill.queue_clock VALUES
	(0.046875);

INSERT INTO waybill.rate_windows VALUES
	('acme', 'endpoints:write', '2026-11-21 12:08:00+00', 2),
	('acme', 'events:write', '2026-11-21 12:08:00+00', 11),
	('other', 'endpoints:write', '2026-11-21 12:07:00+00', 1),
	('other', 'events:write', '2026-11-21 12:07:00+00', 1),
	('acme', 'read', '2026-11-21 12:08:00+00', 385);

INSERT INTO waybill.tenants VALUES
	('acme', 'acme', '{"monthly_events": 1000}', '2026-11-21 12:07:41.806507+00', '2026-11-21 12:07:41.806507+00'),
	('other', 'other', '{}', '2026-11-21 12:07:41.863091+00', '2026-11-21 12:07:41.863091+00');

INSERT INTO waybill.usage VALUES
	('other', '2026-11-01', 'events', 1),
	('other', '2026-11-01', 'attempts', 1),
	('acme', '2026-11-01', 'attempts', 10),
	('acme', '2026-11-01', 'events', 14);

ALTER TABLE ONLY pgboss.bam
    ADD CONSTRAINT bam_pkey PRIMARY KEY (id);

ALTER TABLE ONLY pgboss.job
    ADD CONSTRAINT job_pkey PRIMARY KEY (name, id);

ALTER TABLE ONLY pgboss.jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8
    ADD CONSTRAINT jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8_pkey PRIMARY KEY (name, id);

ALTER TABLE ONLY pgboss.job_common
    ADD CONSTRAINT job_common_pkey PRIMARY KEY (name, id);

ALTER TABLE ONLY pgboss.job_dependency
    ADD CONSTRAINT job_dependency_pkey PRIMARY KEY (child_name, child_id, parent_name, parent_id);

ALTER TABLE ONLY pgboss.queue
    ADD CONSTRAINT queue_pkey PRIMARY KEY (name);

ALTER TABLE ONLY pgboss.queue_stats
    ADD CONSTRAINT queue_stats_pkey PRIMARY KEY (id, captured_on);

ALTER TABLE ONLY pgboss.queue_stats_20261121
    ADD CONSTRAINT queue_stats_20261121_pkey PRIMARY KEY (id, captured_on);

ALTER TABLE ONLY pgboss.queue_stats_20261122
    ADD CONSTRAINT queue_stats_20261122_pkey PRIMARY KEY (id, captured_on);

ALTER TABLE ONLY pgboss.schedule
    ADD CONSTRAINT schedule_pkey PRIMARY KEY (name, key);

ALTER TABLE ONLY pgboss.subscription
    ADD CONSTRAINT subscription_pkey PRIMARY KEY (event, name);

ALTER TABLE ONLY pgboss.version
    ADD CONSTRAINT version_pkey PRIMARY KEY (version);

ALTER TABLE ONLY pgboss.warning
    ADD CONSTRAINT warning_pkey PRIMARY KEY (id);

ALTER TABLE ONLY waybill.api_keys
    ADD CONSTRAINT api_keys_key_hash_key UNIQUE (key_hash);

ALTER TABLE ONLY waybill.api_keys
    ADD CONSTRAINT api_keys_pkey PRIMARY KEY (tenant_id, api_key_id);

ALTER TABLE ONLY waybill.attempt_counts
    ADD CONSTRAINT attempt_counts_pkey PRIMARY KEY (tenant_id, endpoint_id, hour, status_code);

ALTER TABLE ONLY waybill.attempts
    ADD CONSTRAINT attempts_pkey PRIMARY KEY (tenant_id, delivery_id, attempt_number);

ALTER TABLE ONLY waybill.attempts_20261120
    ADD CONSTRAINT attempts_20261120_pkey PRIMARY KEY (tenant_id, delivery_id, attempt_number);

ALTER TABLE ONLY waybill.attempts_20261121
    ADD CONSTRAINT attempts_20261121_pkey PRIMARY KEY (tenant_id, delivery_id, attempt_number);

ALTER TABLE ONLY waybill.attempts_20261122
    ADD CONSTRAINT attempts_20261122_pkey PRIMARY KEY (tenant_id, delivery_id, attempt_number);

ALTER TABLE ONLY waybill.attempts_default
    ADD CONSTRAINT attempts_default_pkey PRIMARY KEY (tenant_id, delivery_id, attempt_number);

ALTER TABLE ONLY waybill.deliveries
    ADD CONSTRAINT deliveries_pkey PRIMARY KEY (tenant_id, delivery_id);

ALTER TABLE ONLY waybill.deliveries_20261120
    ADD CONSTRAINT deliveries_20261120_pkey PRIMARY KEY (tenant_id, delivery_id);

ALTER TABLE ONLY waybill.deliveries_20261121
    ADD CONSTRAINT deliveries_20261121_pkey PRIMARY KEY (tenant_id, delivery_id);

ALTER TABLE ONLY waybill.deliveries_20261122
    ADD CONSTRAINT deliveries_20261122_pkey PRIMARY KEY (tenant_id, delivery_id);

ALTER TABLE ONLY waybill.deliveries_default
    ADD CONSTRAINT deliveries_default_pkey PRIMARY KEY (tenant_id, delivery_id);

ALTER TABLE ONLY waybill.endpoint_stats
    ADD CONSTRAINT endpoint_stats_pkey PRIMARY KEY (tenant_id, endpoint_id);

ALTER TABLE ONLY waybill.endpoints
    ADD CONSTRAINT endpoints_pkey PRIMARY KEY (tenant_id, endpoint_id);

ALTER TABLE ONLY waybill.events
    ADD CONSTRAINT events_pkey PRIMARY KEY (tenant_id, event_id);

ALTER TABLE ONLY waybill.events_20261120
    ADD CONSTRAINT events_20261120_pkey PRIMARY KEY (tenant_id, event_id);

ALTER TABLE ONLY waybill.events_20261121
    ADD CONSTRAINT events_20261121_pkey PRIMARY KEY (tenant_id, event_id);

ALTER TABLE ONLY waybill.events_20261122
    ADD CONSTRAINT events_20261122_pkey PRIMARY KEY (tenant_id, event_id);

ALTER TABLE ONLY waybill.events_default
    ADD CONSTRAINT events_default_pkey PRIMARY KEY (tenant_id, event_id);

ALTER TABLE ONLY waybill.idempotency_keys
    ADD CONSTRAINT idempotency_keys_pkey PRIMARY KEY (tenant_id, key);

ALTER TABLE ONLY waybill.migrations
    ADD CONSTRAINT migrations_pkey PRIMARY KEY (file);

ALTER TABLE ONLY waybill.rate_windows
    ADD CONSTRAINT rate_windows_pkey PRIMARY KEY (tenant_id, action);

ALTER TABLE ONLY waybill.tenants
    ADD CONSTRAINT tenants_pkey PRIMARY KEY (tenant_id);

ALTER TABLE ONLY waybill.tenants
    ADD CONSTRAINT tenants_tenant_slug_key UNIQUE (tenant_slug);

ALTER TABLE ONLY waybill.usage
    ADD CONSTRAINT usage_pkey PRIMARY KEY (tenant_id, month, metric);

CREATE INDEX jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8_i11 ON pgboss.jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8 USING btree (name, priority DESC, created_on, start_after) WHERE ((state < 'active'::pgboss.job_state) AND (NOT blocked));

CREATE INDEX jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8_i12 ON pgboss.jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8 USING btree (source_root_id) WHERE (source_root_id IS NOT NULL);

CREATE UNIQUE INDEX jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8_i4 ON pgboss.jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8 USING btree (name, singleton_on, COALESCE(singleton_key, ''::text)) WHERE ((state <> 'cancelled'::pgboss.job_state) AND (singleton_on IS NOT NULL));

CREATE INDEX jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8_i7 ON pgboss.jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8 USING btree (name, group_id) WHERE ((state = 'active'::pgboss.job_state) AND (group_id IS NOT NULL));

CREATE INDEX jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8_i9 ON pgboss.jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8 USING btree (name, id) WHERE (blocking AND (state = 'completed'::pgboss.job_state));

CREATE UNIQUE INDEX job_common_i1 ON pgboss.job_common USING btree (name, COALESCE(singleton_key, ''::text)) WHERE ((state = 'created'::pgboss.job_state) AND (policy = 'short'::text));

CREATE INDEX job_common_i10 ON pgboss.job_common USING btree (name, singleton_key, state DESC, created_on, id) INCLUDE (start_after) WHERE ((state < 'active'::pgboss.job_state) AND (NOT blocked) AND (policy = 'key_strict_fifo'::text));

CREATE INDEX job_common_i11 ON pgboss.job_common USING btree (name, priority DESC, created_on, start_after) WHERE ((state < 'active'::pgboss.job_state) AND (NOT blocked));

CREATE INDEX job_common_i12 ON pgboss.job_common USING btree (source_root_id) WHERE (source_root_id IS NOT NULL);

CREATE UNIQUE INDEX job_common_i2 ON pgboss.job_common USING btree (name, COALESCE(singleton_key, ''::text)) WHERE ((state = 'active'::pgboss.job_state) AND (policy = 'singleton'::text));

CREATE UNIQUE INDEX job_common_i3 ON pgboss.job_common USING btree (name, state, COALESCE(singleton_key, ''::text)) WHERE ((state <= 'active'::pgboss.job_state) AND (policy = 'stately'::text));

CREATE UNIQUE INDEX job_common_i4 ON pgboss.job_common USING btree (name, singleton_on, COALESCE(singleton_key, ''::text)) WHERE ((state <> 'cancelled'::pgboss.job_state) AND (singleton_on IS NOT NULL));

CREATE UNIQUE INDEX job_common_i6 ON pgboss.job_common USING btree (name, COALESCE(singleton_key, ''::text)) WHERE ((state <= 'active'::pgboss.job_state) AND (policy = 'exclusive'::text));

CREATE INDEX job_common_i7 ON pgboss.job_common USING btree (name, group_id) WHERE ((state = 'active'::pgboss.job_state) AND (group_id IS NOT NULL));

CREATE UNIQUE INDEX job_common_i8 ON pgboss.job_common USING btree (name, singleton_key) WHERE ((state = ANY (ARRAY['active'::pgboss.job_state, 'retry'::pgboss.job_state, 'failed'::pgboss.job_state])) AND (policy = 'key_strict_fifo'::text));

CREATE INDEX job_common_i9 ON pgboss.job_common USING btree (name, id) WHERE (blocking AND (state = 'completed'::pgboss.job_state));

CREATE INDEX job_dep_parent_idx ON pgboss.job_dependency USING btree (parent_name, parent_id);

CREATE INDEX queue_stats_i1 ON ONLY pgboss.queue_stats USING btree (name, captured_on DESC) INCLUDE (deferred_count, queued_count, ready_count, active_count, failed_count, total_count);

CREATE INDEX queue_stats_20261121_name_captured_on_deferred_count_queued_idx ON pgboss.queue_stats_20261121 USING btree (name, captured_on DESC) INCLUDE (deferred_count, queued_count, ready_count, active_count, failed_count, total_count);

CREATE INDEX queue_stats_20261122_name_captured_on_deferred_count_queued_idx ON pgboss.queue_stats_20261122 USING btree (name, captured_on DESC) INCLUDE (deferred_count, queued_count, ready_count, active_count, failed_count, total_count);

CREATE INDEX warning_i1 ON pgboss.warning USING btree (created_on DESC);

CREATE INDEX deliveries_dead ON ONLY waybill.deliveries USING btree (tenant_id, delivery_id) WHERE (status = 'dead_lettered'::waybill.delivery_status);

CREATE INDEX deliveries_20261120_tenant_id_delivery_id_idx ON waybill.deliveries_20261120 USING btree (tenant_id, delivery_id) WHERE (status = 'dead_lettered'::waybill.delivery_status);

CREATE INDEX deliveries_held ON ONLY waybill.deliveries USING btree (tenant_id, endpoint_id, delivery_id) WHERE held;

CREATE INDEX deliveries_20261120_tenant_id_endpoint_id_delivery_id_idx ON waybill.deliveries_20261120 USING btree (tenant_id, endpoint_id, delivery_id) WHERE held;

CREATE INDEX deliveries_live ON ONLY waybill.deliveries USING btree (tenant_id, endpoint_id, held, delivery_id) WHERE (status = ANY (ARRAY['pending'::waybill.delivery_status, 'retrying'::waybill.delivery_status]));

CREATE INDEX deliveries_20261120_tenant_id_endpoint_id_held_delivery_id_idx ON waybill.deliveries_20261120 USING btree (tenant_id, endpoint_id, held, delivery_id) WHERE (status = ANY (ARRAY['pending'::waybill.delivery_status, 'retrying'::waybill.delivery_status]));

CREATE INDEX deliveries_20261121_tenant_id_delivery_id_idx ON waybill.deliveries_20261121 USING btree (tenant_id, delivery_id) WHERE (status = 'dead_lettered'::waybill.delivery_status);

CREATE INDEX deliveries_20261121_tenant_id_endpoint_id_delivery_id_idx ON waybill.deliveries_20261121 USING btree (tenant_id, endpoint_id, delivery_id) WHERE held;

CREATE INDEX deliveries_20261121_tenant_id_endpoint_id_held_delivery_id_idx ON waybill.deliveries_20261121 USING btree (tenant_id, endpoint_id, held, delivery_id) WHERE (status = ANY (ARRAY['pending'::waybill.delivery_status, 'retrying'::waybill.delivery_status]));

CREATE INDEX deliveries_20261122_tenant_id_delivery_id_idx ON waybill.deliveries_20261122 USING btree (tenant_id, delivery_id) WHERE (status = 'dead_lettered'::waybill.delivery_status);

CREATE INDEX deliveries_20261122_tenant_id_endpoint_id_delivery_id_idx ON waybill.deliveries_20261122 USING btree (tenant_id, endpoint_id, delivery_id) WHERE held;

CREATE INDEX deliveries_20261122_tenant_id_endpoint_id_held_delivery_id_idx ON waybill.deliveries_20261122 USING btree (tenant_id, endpoint_id, held, delivery_id) WHERE (status = ANY (ARRAY['pending'::waybill.delivery_status, 'retrying'::waybill.delivery_status]));

CREATE INDEX deliveries_default_tenant_id_delivery_id_idx ON waybill.deliveries_default USING btree (tenant_id, delivery_id) WHERE (status = 'dead_lettered'::waybill.delivery_status);

CREATE INDEX deliveries_default_tenant_id_endpoint_id_delivery_id_idx ON waybill.deliveries_default USING btree (tenant_id, endpoint_id, delivery_id) WHERE held;

CREATE INDEX deliveries_default_tenant_id_endpoint_id_held_delivery_id_idx ON waybill.deliveries_default USING btree (tenant_id, endpoint_id, held, delivery_id) WHERE (status = ANY (ARRAY['pending'::waybill.delivery_status, 'retrying'::waybill.delivery_status]));

CREATE INDEX endpoint_stats_held ON waybill.endpoint_stats USING btree (tenant_id, endpoint_id) WHERE (held > 0);

CREATE INDEX idempotency_keys_age ON waybill.idempotency_keys USING brin (event_id);

ALTER INDEX pgboss.job_pkey ATTACH PARTITION pgboss.jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8_pkey;

ALTER INDEX pgboss.job_pkey ATTACH PARTITION pgboss.job_common_pkey;

ALTER INDEX pgboss.queue_stats_i1 ATTACH PARTITION pgboss.queue_stats_20261121_name_captured_on_deferred_count_queued_idx;

ALTER INDEX pgboss.queue_stats_pkey ATTACH PARTITION pgboss.queue_stats_20261121_pkey;

ALTER INDEX pgboss.queue_stats_i1 ATTACH PARTITION pgboss.queue_stats_20261122_name_captured_on_deferred_count_queued_idx;

ALTER INDEX pgboss.queue_stats_pkey ATTACH PARTITION pgboss.queue_stats_20261122_pkey;

ALTER INDEX waybill.attempts_pkey ATTACH PARTITION waybill.attempts_20261120_pkey;

ALTER INDEX waybill.attempts_pkey ATTACH PARTITION waybill.attempts_20261121_pkey;

ALTER INDEX waybill.attempts_pkey ATTACH PARTITION waybill.attempts_20261122_pkey;

ALTER INDEX waybill.attempts_pkey ATTACH PARTITION waybill.attempts_default_pkey;

ALTER INDEX waybill.deliveries_pkey ATTACH PARTITION waybill.deliveries_20261120_pkey;

ALTER INDEX waybill.deliveries_dead ATTACH PARTITION waybill.deliveries_20261120_tenant_id_delivery_id_idx;

ALTER INDEX waybill.deliveries_held ATTACH PARTITION waybill.deliveries_20261120_tenant_id_endpoint_id_delivery_id_idx;

ALTER INDEX waybill.deliveries_live ATTACH PARTITION waybill.deliveries_20261120_tenant_id_endpoint_id_held_delivery_id_idx;

ALTER INDEX waybill.deliveries_pkey ATTACH PARTITION waybill.deliveries_20261121_pkey;

ALTER INDEX waybill.deliveries_dead ATTACH PARTITION waybill.deliveries_20261121_tenant_id_delivery_id_idx;

ALTER INDEX waybill.deliveries_held ATTACH PARTITION waybill.deliveries_20261121_tenant_id_endpoint_id_delivery_id_idx;

ALTER INDEX waybill.deliveries_live ATTACH PARTITION waybill.deliveries_20261121_tenant_id_endpoint_id_held_delivery_id_idx;

ALTER INDEX waybill.deliveries_pkey ATTACH PARTITION waybill.deliveries_20261122_pkey;

ALTER INDEX waybill.deliveries_dead ATTACH PARTITION waybill.deliveries_20261122_tenant_id_delivery_id_idx;

ALTER INDEX waybill.deliveries_held ATTACH PARTITION waybill.deliveries_20261122_tenant_id_endpoint_id_delivery_id_idx;

ALTER INDEX waybill.deliveries_live ATTACH PARTITION waybill.deliveries_20261122_tenant_id_endpoint_id_held_delivery_id_idx;

ALTER INDEX waybill.deliveries_pkey ATTACH PARTITION waybill.deliveries_default_pkey;

ALTER INDEX waybill.deliveries_dead ATTACH PARTITION waybill.deliveries_default_tenant_id_delivery_id_idx;

ALTER INDEX waybill.deliveries_held ATTACH PARTITION waybill.deliveries_default_tenant_id_endpoint_id_delivery_id_idx;

ALTER INDEX waybill.deliveries_live ATTACH PARTITION waybill.deliveries_default_tenant_id_endpoint_id_held_delivery_id_idx;

ALTER INDEX waybill.events_pkey ATTACH PARTITION waybill.events_20261120_pkey;

ALTER INDEX waybill.events_pkey ATTACH PARTITION waybill.events_20261121_pkey;

ALTER INDEX waybill.events_pkey ATTACH PARTITION waybill.events_20261122_pkey;

ALTER INDEX waybill.events_pkey ATTACH PARTITION waybill.events_default_pkey;

ALTER TABLE ONLY pgboss.jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8
    ADD CONSTRAINT dlq_fkey FOREIGN KEY (dead_letter) REFERENCES pgboss.queue(name) ON DELETE RESTRICT DEFERRABLE INITIALLY DEFERRED;

ALTER TABLE ONLY pgboss.job_common
    ADD CONSTRAINT dlq_fkey FOREIGN KEY (dead_letter) REFERENCES pgboss.queue(name) ON DELETE RESTRICT DEFERRABLE INITIALLY DEFERRED;

ALTER TABLE ONLY pgboss.jdcedf139e9f384b00f7b6f892e24f0291bba2490d8848de47df1f6b8
    ADD CONSTRAINT q_fkey FOREIGN KEY (name) REFERENCES pgboss.queue(name) ON DELETE RESTRICT DEFERRABLE INITIALLY DEFERRED;

ALTER TABLE ONLY pgboss.job_common
    ADD CONSTRAINT q_fkey FOREIGN KEY (name) REFERENCES pgboss.queue(name) ON DELETE RESTRICT DEFERRABLE INITIALLY DEFERRED;

ALTER TABLE ONLY pgboss.queue
    ADD CONSTRAINT queue_dead_letter_fkey FOREIGN KEY (dead_letter) REFERENCES pgboss.queue(name);

ALTER TABLE ONLY pgboss.schedule
    ADD CONSTRAINT schedule_name_fkey FOREIGN KEY (name) REFERENCES pgboss.queue(name) ON DELETE CASCADE;

ALTER TABLE ONLY pgboss.subscription
    ADD CONSTRAINT subscription_name_fkey FOREIGN KEY (name) REFERENCES pgboss.queue(name) ON DELETE CASCADE;

ALTER TABLE ONLY waybill.api_keys
    ADD CONSTRAINT api_keys_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES waybill.tenants(tenant_id);

ALTER TABLE ONLY waybill.endpoints
    ADD CONSTRAINT endpoints_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES waybill.tenants(tenant_id);
